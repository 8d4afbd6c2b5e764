"""Evaluations after the fact: put side by side, and checked against a baseline."""

import itertools
import math
from collections import Counter
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation.margin import margin_left
from moh_llm.evaluation.record import average_rows
from moh_llm.evaluation.statistics import plain_mean
from moh_llm.records.evaluation import VERSION, EvaluationRecord, Row, SuiteRecord

# What decides whether two scores on a benchmark measure the same thing.
_SAME = ("shots", "metric", "dataset", "revision", "eval_split", "fewshot_split")
# The same, where both records know it: the first is None where several are read as one, the second for data of the
# Hub, the others where the suite names no chance rule.
_SAME_WHERE_KNOWN = ("dataset_config", "data_sha256", "chance_rule", "chance")
# The same weights on the same items may differ by the rounding of another batch size; in points.
_ROUNDING = 1e-6
# A fall is reported with so many of the benchmarks that fell most.
_NAMED = 3

_Labels = dict[tuple[str, str], str]


def merge(records: dict[str, EvaluationRecord]) -> EvaluationRecord:
    """Several evaluations side by side, by the names of their folders, as one record.

    Averages are over the benchmarks that every model has. A single record is returned as it is.

    Raises UserError when a benchmark was not scored alike in all of them, or when their bases differ.
    """
    if not records:
        raise ValueError("no records to merge")
    # The items' logs lie in the evaluation's own folder.
    for figures in (f for record in records.values() for row in record.benchmarks for f in row.scores.values()):
        figures.samples = None
    if len(records) == 1:
        return next(iter(records.values()))
    _check_comparable({f"in {name}": record for name, record in records.items()})
    _check_bases(records)
    labels = _new_labels(records)
    models = {labels[name, label]: about for name, r in records.items() for label, about in r.models.items()}
    if "base" in models:
        models = {"base": models.pop("base"), **models}
    rows = _rows(records, labels)
    suites = [record.suite for record in records.values()]
    columns = list(dict.fromkeys(column for suite in suites for column in suite.columns))
    errors = [
        error.model_copy(update={"model": labels[name, error.model]})
        for name, record in records.items()
        for error in record.errors
    ]
    partial = {benchmark for record in records.values() for benchmark in record.partial_data}
    first = next(iter(records.values()))
    return EvaluationRecord(
        version=VERSION,
        suite=SuiteRecord(
            name=" + ".join(dict.fromkeys(suite.name for suite in suites)),
            title=" + ".join(dict.fromkeys(suite.title for suite in suites)),
            columns=columns,
        ),
        models=models,
        benchmarks=rows,
        average=average_rows(rows, {label: about.compared for label, about in models.items()}, columns),
        errors=[error for number, error in enumerate(errors) if error not in errors[:number]],
        limit=first.limit,
        partial_data=[row.name for row in rows if row.name in partial],
        data=_common({name: record.data for name, record in records.items()}),
        dtype=first.dtype,
        batch_size=_common({name: record.batch_size for name, record in records.items()}),
        share_prefixes=any(record.share_prefixes for record in records.values()),
        processes=max(record.processes for record in records.values()),
        seeds=_common_values({name: record.seeds for name, record in records.items()}),
        versions=_common_values({name: record.versions for name, record in records.items()}),
        command="\n".join(dict.fromkeys(record.command for record in records.values())),
        created=max(record.created for record in records.values()),
        analysis={labels[n, label]: found for n, r in records.items() for label, found in r.analysis.items()},
    )


def check_regression(record: EvaluationRecord, baseline: EvaluationRecord, max_drop: float) -> list[str]:
    """One line for each model of ``record`` whose average fell by over ``max_drop`` points, or that lacks a score.

    A model is compared with that of the same label in ``baseline``, or with its only one, over the benchmarks that
    both have. Bases are not compared. Raises UserError for a ``max_drop`` that is no drop, a model without
    counterpart, and evaluations that have no benchmark in common or did not score it alike.
    """
    if not 0 <= max_drop < math.inf:
        raise UserError(f"--max-drop {max_drop} must be a number of points of 0 or more")
    _check_comparable({"in this evaluation": record, "in the baseline": baseline})
    rows, old_rows = ({row.name: row for row in one.benchmarks} for one in (record, baseline))
    if not rows.keys() & old_rows.keys():
        raise UserError("this evaluation and the baseline have no benchmark in common; evaluate both on one suite")
    lines = []
    for label in record.compared_models:
        counterpart = _counterpart(label, baseline)
        before = {name: row.scores[counterpart] for name, row in old_rows.items() if counterpart in row.scores}
        after = {name: rows[name].scores[label] for name in before if name in rows and label in rows[name].scores}
        problems = []
        if missing := [name for name in before if name not in after]:
            problems.append(f"no score on {', '.join(missing)}, which the baseline has")
        values = {name: (before[name].value, figures.value) for name, figures in after.items()}
        if values and (fall := _fall(values, max_drop)):
            problems.append(fall + margin_left([(before[name], after[name]) for name in after]))
        if problems:
            lines.append(f"{label}: {'; '.join(problems)}")
    return lines


def _check_comparable(records: dict[str, EvaluationRecord]) -> None:
    """Raise UserError where two records, each under the words for its place, did not score a benchmark alike."""
    for (here, one), (there, other) in itertools.combinations(records.items(), 2):
        others = {row.name: row for row in other.benchmarks}
        for row in one.benchmarks:
            if row.name not in others:
                continue
            facts, other_facts = _facts(row), _facts(others[row.name])
            for key, value in facts.items():
                if key in _SAME or None not in (value, other_facts[key]):
                    _check_same(f"benchmark {row.name}: {key}", here, value, there, other_facts[key])
        _check_same("--limit", here, one.limit, there, other.limit)
        _check_same("compute dtype", here, one.dtype, there, other.dtype, "with one --compute-dtype")


def _facts(row: Row) -> dict[str, Any]:
    facts = {key: getattr(row, key) for key in (*_SAME, *_SAME_WHERE_KNOWN)}
    # Part of the data is another benchmark, too.
    return facts | {"items": max((figures.items for figures in row.scores.values()), default=None)}


def _check_same(what: str, here: str, value: Any, there: str, other: Any, how: str = "alike") -> None:
    if value != other:
        one, two = ("none" if v is None else v for v in (value, other))
        raise UserError(
            f"{what} is {one} {here} and {two} {there}, so the scores cannot be compared; evaluate both {how}"
        )


def _check_bases(records: dict[str, EvaluationRecord]) -> None:
    """Raise UserError unless all bases have the same weights, and equal scores wherever two have one."""
    with_base = {name: record for name, record in records.items() if "base" in record.models}
    for (here, one), (there, other) in itertools.combinations(with_base.items(), 2):
        about, other_about = one.models["base"], other.models["base"]
        known = about.weights_sha256 or about.revision
        keys = ("weights_sha256", "revision") if known else ("weights_sha256", "revision", "model")
        if any(getattr(about, key) != getattr(other_about, key) for key in keys):
            raise UserError(f"{here} and {there} have different bases; evaluate all models with one --base")
        others = {row.name: row.scores["base"].value for row in other.benchmarks if "base" in row.scores}
        for row in one.benchmarks:
            if "base" in row.scores and row.name in others:
                value = row.scores["base"].value
                if not math.isclose(value, others[row.name], rel_tol=0, abs_tol=_ROUNDING):
                    raise UserError(
                        f"the base scores {value:.2f} on {row.name} in {here} and {others[row.name]:.2f} in {there}; "
                        "evaluate all models in one run"
                    )


def _new_labels(records: dict[str, EvaluationRecord]) -> _Labels:
    """The merged record's label for each (folder name, label)."""
    # A single model is called "model", whichever it is: its folder says more.
    places = [(name, label) for name, record in records.items() for label in record.models]
    wanted = {place: place[0] if place[1] == "model" else place[1] for place in places}
    times = Counter(label for label in wanted.values() if label != "base")
    labels: _Labels = {}
    for (name, label), new in wanted.items():
        if (new == "base" and label != "base") or times[new] > 1:  # a folder of that name
            new = f"{label} ({name})"
        labels[name, label] = new if label == "base" else _free(new, set(labels.values()))
    return labels


def _free(label: str, used: set[str]) -> str:
    """``label``, or with a number after it if that is in use."""
    return next(new for n in itertools.count(1) if (new := label if n == 1 else f"{label} {n}") not in used)


def _rows(records: dict[str, EvaluationRecord], labels: _Labels) -> list[Row]:
    """All benchmarks with the figures of all models; a base's from the first record that has them."""
    rows: dict[str, Row] = {}
    for name, record in records.items():
        for row in record.benchmarks:
            scores = {labels[name, label]: figures for label, figures in row.scores.items()}
            if row.name not in rows:
                rows[row.name] = row.model_copy(update={"scores": scores})
            else:
                found = rows[row.name]
                found.published = row.published | found.published
                found.scores = scores | found.scores
    return list(rows.values())


def _common(values: dict[str, Any]) -> Any:
    """The value that all records have; where they differ, each value with the name of its record."""
    first = next(iter(values.values()))
    if all(value == first for value in values.values()):
        return first
    return " / ".join(f"{value} ({name})" for name, value in values.items())


def _common_values(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for value in values.values() for key in value)
    return {key: _common({name: value.get(key) for name, value in values.items()}) for key in keys}


def _counterpart(label: str, baseline: EvaluationRecord) -> str:
    """The baseline's model that ``label`` is compared with."""
    models = baseline.compared_models
    if label in models:
        return label
    if len(models) != 1:
        raise UserError(
            f"the baseline has no model {label}, only {', '.join(models) or 'a base'}; evaluate it under the same name"
        )
    return models[0]


def _fall(values: dict[str, tuple[float, float]], max_drop: float) -> str | None:
    """A message about an average that fell by more than ``max_drop`` points, else None; ``values``: before, after."""
    old, new = (plain_mean([pair[which] for pair in values.values()]) for which in (0, 1))
    drop = old - new
    if drop <= max_drop + 1e-9:  # less than that is rounding
        return None
    # As many digits as it takes to see that it is more.
    shown = next(text for digits in range(2, 12) if float(text := f"{drop:.{digits}f}") > max_drop)
    changes = sorted((after - before, name) for name, (before, after) in values.items() if after < before)
    falls = ", ".join(f"{name} ({change:+.1f})" for change, name in changes[:_NAMED])
    number = "1 benchmark" if len(values) == 1 else f"{len(values)} benchmarks"
    return (
        f"average fell by {shown} points ({old:.1f} to {new:.1f}) over {number}, more than --max-drop {max_drop:g}; "
        f"most on {falls}"
    )
