"""An evaluation as a model's card shows it: the column of this model and of its base, and Hub metadata."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import EvalResult

from moh_llm.claims.limits import is_result
from moh_llm.errors import UserError
from moh_llm.evaluation.rendering import plain
from moh_llm.records.evaluation import EvaluationRecord, Row, read_evaluation
from moh_llm.records.identity import identify


@dataclass(frozen=True)
class Evaluated:
    """The part of an evaluation that is about one model.

    Attributes:
        record: the evaluation's, with no other models than this one and its base, and no other's analysis.
        label: this model's column.
    """

    record: EvaluationRecord
    label: str

    @property
    def base(self) -> str | None:
        """The base's column, if the base was scored, too."""
        return "base" if self.record.models[self.label].compared else None


def find_evaluated(evaluation: Path, folder: Path) -> Evaluated:
    """The part of an evaluation that is about the model in ``folder``: that with the same weights and head plan.

    Args:
        evaluation: the folder that `moh-llm evaluate` wrote, or its ``report.json``.
        folder: the model's.

    Raises:
        UserError: it is not an evaluation, or no model in it is this folder's.
    """
    record = read_evaluation(evaluation.parent if evaluation.name == "report.json" else evaluation)
    own = identify(str(folder))
    alike = [name for name, about in record.models.items() if about.weights_sha256 == own.weights]
    label = next((name for name in alike if record.models[name].plan_sha256 == own.plan), None)
    if label is None:
        other = f"the weights in {folder} with another head plan" if alike else f"other weights than those in {folder}"
        scored = ", ".join(about.model for about in record.models.values())
        raise UserError(f"{evaluation} scored {other} ({scored}); evaluate {folder}")
    record.models = {
        name: about
        for name, about in record.models.items()
        if name == label or (name == "base" and record.models[label].compared)
    }
    for row in record.benchmarks:
        row.scores = {name: figures for name, figures in row.scores.items() if name in record.models}
    record.errors = [error for error in record.errors if error.model in record.models]
    record.analysis = {name: found for name, found in record.analysis.items() if name == label}
    return Evaluated(record, label)


def eval_results(evaluated: Evaluated) -> list[EvalResult]:
    """The scores as the Hub's `model-index` holds them, in percent as in ``report.json``, unrounded.

    A score on only some of a benchmark's items, or on few, is no result and left out (`is_result`).
    """
    record = evaluated.record
    rows = [row for row in record.benchmarks if evaluated.label in row.scores and is_result(row, record)]
    results = [_result(row, evaluated.label) for row in rows]
    benchmarks = Counter(result.unique_identifier for result in results)
    for result in results:
        # The Hub files these under the first one's name.
        if benchmarks[result.unique_identifier] > 1:
            result.metric_name = f"{result.dataset_name}: {result.metric_name}"
    return results


def _result(row: Row, label: str) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        task_name="Text Generation",
        dataset_type=_label(row.dataset),
        dataset_name=_label(row.name),
        dataset_config=None if row.dataset_config is None else _label(row.dataset_config),
        dataset_split=_label(row.eval_split),
        dataset_revision=row.revision,
        # "exact_match (strict-match)": the metric and the filter before it.
        metric_type=_label(row.metric).split(" (")[0],
        metric_name=_label(f"{row.metric}, {row.shots}-shot"),
        metric_value=row.scores[label].value,
        verified=False,
    )


def _label(value: str) -> str:
    """A name as a page that shows it unescaped can hold it: letters, digits, and what names of data sets have."""
    return " ".join(re.sub(r"[^\w .,:;()+/@=%-]", " ", plain(value)).split())[:100] or "-"
