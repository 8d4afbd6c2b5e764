"""Runs side by side: those that differ only by their seed are one group, compared at equal token counts."""

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from moh_llm.evaluation.runs import Record, TrainingRun
from moh_llm.records.lineage import REFERENCES, in_words
from moh_llm.training.changed_keys import changed_keys

METRICS = ("ratio", "kl", "top1_agreement", "perplexity")


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, model and text, each with another seed."""

    name: str
    runs: tuple[TrainingRun, ...]


def group_runs(runs: Sequence[TrainingRun]) -> list[Group]:
    """Put runs that differ only by their seed together.

    Runs that share their seed, too, are not independent samples: the second starts another group.
    """
    members: list[list[TrainingRun]] = []
    for run in runs:
        for group in members:
            if not _changed(group[0], run) and run.seed not in [other.seed for other in group]:
                group.append(run)
                break
        else:
            members.append([run])
    names: list[str] = []
    for group in members:
        first = group[0].name
        choices = (_common_name([run.name for run in group]), first, f"{first} ({len(names) + 1})")
        names.append(next(name for name in choices if name and name not in names))
    return [Group(name, tuple(group)) for name, group in zip(names, members, strict=True)]


def differences(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Per recipe key that differs between groups its value in each; `model` and `data` go by their hashes.

    What figures are against, `reference`, is no key of the recipe, but sets runs apart, too.
    """
    first = groups[0].runs[0]
    keys: dict[str, None] = {}  # in the order of their discovery
    for group in groups[1:]:
        keys |= dict.fromkeys(_changed(first, group.runs[0]))
    return {key: {group.name: _value(group.runs[0], key) for group in groups} for key in keys}


def compare(groups: Sequence[Group]) -> list[Record]:
    """Scores at the token counts at which at least two runs were scored.

    Returns:
        Records with ``tokens``, ``saved_model`` (scores of the saved models rather than of those in
        training), and per group that has any: ``n`` runs, mean and standard deviation (None for one
        run) of each of `METRICS` (None where a run lacks it), ``documents`` (None where that is not
        on record, or differs), and of one run ``ratio_interval`` and ``kl_interval``.
    """
    found: dict[tuple[int, bool], dict[str, list[Record]]] = {}
    for group in groups:
        for run in group.runs:
            saved = [(True, run.saved_score)] if run.saved_score else []
            for is_saved, score in [*((False, score) for score in run.scores), *saved]:
                found.setdefault((score["tokens"], is_saved), {}).setdefault(group.name, []).append(score)
    return [
        {
            "tokens": tokens,
            "saved_model": is_saved,
            "groups": {
                name: {"n": len(scores)}
                | {metric: spread(score[metric] for score in scores) for metric in METRICS}
                | _documents(scores)
                for name, scores in by_group.items()
            },
        }
        for (tokens, is_saved), by_group in sorted(found.items())
        if sum(map(len, by_group.values())) > 1
    ]


def _documents(scores: Sequence[Record]) -> Record:
    """Number of held-out documents of a group, and for a single run the intervals over them."""
    counts, only = {score["held_out_documents"] for score in scores}, scores[0] if len(scores) == 1 else {}
    intervals = {key: only.get(key) for key in ("ratio_interval", "kl_interval")}
    return {"documents": counts.pop() if len(counts) == 1 else None} | intervals


def same_held_out_text(runs: Sequence[TrainingRun]) -> bool:
    """Whether all scores are of the same text, as far as the records tell."""
    texts = set()
    for run in runs:
        text = [run.record.data, run.recipe["data"]["sequence_length"], run.recipe["evaluation"]["max_tokens"]]
        texts.add(json.dumps(text, sort_keys=True))
    return len(texts) < 2


def reference_words(groups: Sequence[Group]) -> tuple[str, str]:
    """`in_words` of what the figures of all runs are against."""
    runs = [run for group in groups for run in group.runs]
    return in_words(run.reference for run in runs if run.compares)


def spread(values: Iterable[float | None]) -> Record | None:
    """Mean and sample standard deviation (None for one value); None where a value is missing."""
    numbers = list(values)
    if None in numbers or not numbers:
        return None
    return {
        "mean": statistics.fmean(numbers),
        "std": statistics.stdev(numbers) if len(numbers) > 1 else None,
    }


def _changed(one: TrainingRun, other: TrainingRun) -> list[str]:
    """Keys, other than the seed, in which two runs differ."""
    named = [key for key in ("model", "data") if getattr(one.record, key) != getattr(other.record, key)]
    named += ["reference"] if one.reference != other.reference else []
    return named + [key for key in changed_keys(one.recipe, other.recipe) if key != "seed"]


def _value(run: TrainingRun, key: str) -> Any:
    if key == "reference":
        return REFERENCES[run.reference]
    if key not in ("model", "data"):
        return reduce(
            lambda value, name: value.get(name) if isinstance(value, dict) else None, key.split("."), run.recipe
        )
    # Two folders may have the same name at different times, so the hash says what the name does not.
    identity = json.dumps(run.record.data, sort_keys=True)
    sha256 = run.record.model.sha256 if key == "model" else hashlib.sha256(identity.encode()).hexdigest()
    return f"{run.recipe['model'] if key == 'model' else run.recipe['data']['mixture']} ({str(sha256)[:8]})"


def _common_name(names: Sequence[str]) -> str:
    """Common prefix of the names of a group's runs, without the part that introduces the seed's number."""
    if len(names) == 1:
        return names[0]
    first, last = min(names), max(names)  # what these two share, all names share
    length = next(
        (index for index, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first)
    )
    return re.sub(r"([-_. /]+(seed|s)?|[-_. /]*\d+)[-_. /]*$", "", first[:length])
