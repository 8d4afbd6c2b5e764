"""Chance scores: the mean score of a uniform guess, item by item."""

from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError
from moh_llm.evaluation import statistics
from moh_llm.evaluation.suite import Benchmark

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

# The metrics of lm-eval's multiple choice that name one choice as the answer.
_PICKS = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info"}
# A log-likelihood beside which another choice has no probability.
_UNLIKELY = -1e4


def chances_of(
    benchmark: Benchmark, tasks: "list[ConfigurableTask]", limit: int | None = None
) -> statistics.Strata | None:
    """Each item's chance score in the form of `Score.strata`; None where the suite names no chance rule.

    ``limit``: how many rows of each task are scored; None: all. Raises UserError where the rule is "choices" and the
    score is not that of a choice.
    """
    if benchmark.chance is None:
        return None
    strata = [[_of_row(benchmark, task, row) for row in _rows(task, limit)] for task in tasks]
    return statistics.average_readings(strata) if benchmark.average == "parts" else strata


def lacks_choices(benchmark: Benchmark, task: "ConfigurableTask") -> bool:
    """Whether the chance rule is "choices" and the metric is not the score of a choice."""
    known = callable(task.config.process_results) or benchmark.metric in _PICKS
    return benchmark.chance == "choices" and not (task.OUTPUT_TYPE == "multiple_choice" and known)


def _rows(task: "ConfigurableTask", limit: int | None) -> list[dict[str, Any]]:
    columns = task.task_docs[:limit]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _of_row(benchmark: Benchmark, task: "ConfigurableTask", row: dict[str, Any]) -> float:
    if benchmark.chance != "choices":
        return float(benchmark.chance or 0.0)
    choices = task.doc_to_choice(row)
    if callable(task.config.process_results):
        return _by_trying(benchmark, task, row, len(choices))
    label = task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row)
    labels = label if isinstance(label, list) else [label]
    return len({one if isinstance(one, int) else choices.index(one) for one in labels}) / len(choices)


def _by_trying(benchmark: Benchmark, task: "ConfigurableTask", row: dict[str, Any], choices: int) -> float:
    """The mean of a task's own score over models that are each certain of another choice."""
    scores = []
    for sure in range(choices):
        likelihoods = [(0.0, True) if number == sure else (_UNLIKELY, False) for number in range(choices)]
        result = task.process_results(row, likelihoods)
        if benchmark.metric not in result:
            raise UserError(f"benchmark {benchmark.name}: chance='choices' does not go with {benchmark.metric}")
        scores.append(float(result[benchmark.metric]))
    return sum(scores) / choices
