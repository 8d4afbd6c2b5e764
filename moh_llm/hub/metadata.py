"""The metadata of a model's card, which the Hub reads: base, licence, datasets, and scores as results."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from moh_llm.errors import UserError
from moh_llm.evaluation.rendering import address, plain
from moh_llm.evaluation.runs import TrainingRun
from moh_llm.hub.lineage import Licence, Lineage, is_hub_id
from moh_llm.records.conversion import last_component
from moh_llm.records.evaluation import FEWEST_ITEMS, EvaluationRecord
from moh_llm.records.tokens import read_tokens

# Task, metric and its name on the Hub. The cosine to another model's class token is no score of a task.
_IMAGE_SCORES = {
    "top1": ("image-classification", "accuracy", "top-1 accuracy"),
    "top5": ("image-classification", "accuracy", "top-5 accuracy"),
    "error": ("image-generation", "mse", "squared error to the noise"),
}


def make_metadata(
    name: str, lineage: Lineage, licence: Licence | None, eval_results: list[EvalResult], **related: str | None
) -> ModelCardData:
    """The metadata of the model called ``name``; ``related``: fields that its kind of model has."""
    if lineage.base_id:
        related["base_model_relation"] = "finetune"
    if licence:
        related["license"] = licence.id
    if licence and licence.id == "other":  # the Hub wants a name and a link
        related["license_name"] = licence.name or "see-license-link"
        related["license_link"] = address(licence.link) or (licence.file.name if licence.file else None)
    return ModelCardData(
        base_model=lineage.base_id,
        datasets=_hub_datasets(lineage.run) or None,
        tags=["mixture-of-head", "moh"],
        model_name=name if eval_results else None,
        eval_results=eval_results or None,
        **related,
    )


def text_results(report: EvaluationRecord, label: str) -> list[EvalResult]:
    """The scores of a text model as the Hub's `model-index` holds them, in percent as in ``report.json``, unrounded."""
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=_plain_name(row.dataset),
            dataset_name=_plain_name(row.name),
            dataset_config=None if row.dataset_config is None else _plain_name(row.dataset_config),
            dataset_split=_plain_name(row.eval_split),
            dataset_revision=row.revision,
            # "exact_match (strict-match)": the metric and the filter before it.
            metric_type=_plain_name(row.metric).split(" (")[0],
            metric_name=_plain_name(f"{row.metric}, {row.shots}-shot"),
            metric_value=row.scores[label].value,
            verified=False,
        )
        for row in report.results(label)
    ]
    of_dataset = Counter(result.unique_identifier for result in results)
    for result in results:
        # The Hub files several benchmarks of one dataset under the name of the first.
        if of_dataset[result.unique_identifier] > 1:
            result.metric_name = f"{result.dataset_name}: {result.metric_name}"
    return results


def image_results(report: dict[str, Any], label: str) -> list[EvalResult]:
    """The same of a classifier's accuracies and a DiT's error, as in ``report.json``; none on part of the images."""
    found, split, name = report["models"][label], report.get("split"), report["images"]
    if report.get("limit", 0) is not None or found["count"] < FEWEST_ITEMS:
        return []
    name = _plain_name(name.partition(":")[0] if split else last_component(name))
    return [
        EvalResult(
            task_type=task,
            dataset_type=name,
            dataset_name=name,
            dataset_split=split and _plain_name(split),
            metric_type=kind,
            metric_name=metric,
            metric_value=found["scores"][score]["value"]["value"],
            verified=False,
        )
        for score, (task, kind, metric) in _IMAGE_SCORES.items()
        if score in found["scores"]
    ]


def _plain_name(value: str) -> str:
    """A name without markup, since the Hub's pages may show it unescaped."""
    return " ".join(re.sub(r"[^\w .,:;()+/@=%-]", " ", plain(value)).split())[:100] or "-"


def _hub_datasets(run: TrainingRun | None) -> list[str]:
    """Ids of the Hub datasets that training read, if the record of its tokens is on this machine."""
    if run is None or not run.record.tokens_in:
        return []
    try:
        sources = read_tokens(Path(run.record.tokens_in)).sources
    except UserError:
        return []
    read = [name for name, entry in (run.record.data_read or {}).items() if entry["tokens"] and name in sources]
    files = [part.file for name in read for part in sources[name].text]
    found = [re.match(r"hf://datasets/([^/@]+/[^/@]+)", file) for file in files]
    return list(dict.fromkeys(match[1] for match in found if match and is_hub_id(match[1])))
