"""Evaluations after the fact: put side by side, and checked against a baseline."""

import itertools
import math
from collections import Counter
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation.record import average_rows
from moh_llm.records.evaluation import VERSION, EvaluationRecord, Row, SuiteRecord

# What decides whether two scores on a benchmark measure the same thing.
_SAME = ("shots", "metric", "dataset", "revision", "eval_split", "fewshot_split")
# The same, where both records know it: the first is None where several configs are read as one, the second for data of
# the Hub, the others where the suite has no chance rule.
_SAME_WHERE_KNOWN = ("dataset_config", "data_sha256", "chance_rule", "chance")
# The same weights on the same items may differ by the rounding of another batch size; in points.
_ROUNDING = 1e-6
# Number of benchmarks that a report of a fall names.
_NAMED = 3

_Labels = dict[tuple[str, str], str]


def merge(records: dict[str, EvaluationRecord]) -> EvaluationRecord:
    """Several evaluations side by side, by the names of their folders, as one record.

    Averages are over the benchmarks that every model has. A single record is returned as it is.

    Raises UserError if a benchmark was not scored alike in all of them, or if their bases differ.
    """
    # The items' logs are in the evaluation's own folder.
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
    """One line for each model of ``record`` whose average fell by more than ``max_drop`` points, or that lacks a score.

    A model is compared with the model of the same label in ``baseline``, or with its only model, over the benchmarks
    that both have. Bases are not compared. Raises UserError for a negative ``max_drop``, a model without counterpart,
    and evaluations that have no benchmark in common or did not score it alike.
    """
    if not 0 <= max_drop < math.inf:
        raise UserError(f"--max-drop {max_drop} must be a number of points of 0 or more")
    _check_comparable({"in this evaluation": record, "in the baseline": baseline})
    rows, old_rows = ({row.name: row.scores for row in one.benchmarks} for one in (record, baseline))
    if not rows.keys() & old_rows.keys():
        raise UserError("this evaluation and the baseline have no benchmark in common; evaluate both on one suite")
    lines = []
    for label in record.compared_models:
        known = baseline.compared_models
        if label not in known and len(known) != 1:
            listed = ", ".join(known) or "a base"
            raise UserError(f"the baseline has no model {label}, only {listed}; evaluate it under the same name")
        counterpart = label if label in known else known[0]
        before = {name: scores[counterpart].value for name, scores in old_rows.items() if counterpart in scores}
        after = {name: rows[name][label].value for name in before if name in rows and label in rows[name]}
        problems = []
        if missing := [name for name in before if name not in after]:
            problems.append(f"no score on {', '.join(missing)}, which the baseline has")
        if after and (fall := _fall({name: (before[name], value) for name, value in after.items()}, max_drop)):
            problems.append(fall)
        if problems:
            lines.append(f"{label}: {'; '.join(problems)}")
    return lines


def _check_comparable(records: dict[str, EvaluationRecord]) -> None:
    """Raise UserError if two records, which the keys name as a clause, did not score a benchmark alike."""
    for (here, one), (there, other) in itertools.combinations(records.items(), 2):
        others = {row.name: _facts(row) for row in other.benchmarks}
        for row in (row for row in one.benchmarks if row.name in others):
            for key, value in _facts(row).items():
                if key in _SAME or None not in (value, others[row.name][key]):
                    _check_same(f"benchmark {row.name}: {key}", here, value, there, others[row.name][key])
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
        scores, others = (
            {row.name: row.scores["base"].value for row in record.benchmarks if "base" in row.scores}
            for record in (one, other)
        )
        for name in scores.keys() & others.keys():
            if not math.isclose(scores[name], others[name], rel_tol=0, abs_tol=_ROUNDING):
                raise UserError(
                    f"the base scores {scores[name]:.2f} on {name} in {here} and {others[name]:.2f} in {there}; "
                    "evaluate all models in one run"
                )


def _new_labels(records: dict[str, EvaluationRecord]) -> _Labels:
    """The merged record's label for each (folder name, label)."""
    places = [(name, label) for name, record in records.items() for label in record.models]
    # A single model is called "model", whichever it is: its folder says more.
    wanted = {place: place[0] if place[1] == "model" else place[1] for place in places}
    times = Counter(new for (_, label), new in wanted.items() if label != "base")
    labels = {
        (name, label): f"{label} ({name})" if label != "base" and (new == "base" or times[new] > 1) else new
        for (name, label), new in wanted.items()
    }
    for new, count in Counter(new for (_, label), new in labels.items() if label != "base").items():
        if count > 1:
            raise UserError(f"{count} models would be called {new}; rename a folder")
    return labels


def _rows(records: dict[str, EvaluationRecord], labels: _Labels) -> list[Row]:
    """All benchmarks with the figures of all models; a base's from the first record that has them."""
    rows: dict[str, Row] = {}
    for name, record in records.items():
        for row in record.benchmarks:
            scores = {labels[name, label]: figures for label, figures in row.scores.items()}
            found = rows.setdefault(row.name, row.model_copy(update={"scores": {}}))
            found.published = row.published | found.published
            found.scores = scores | found.scores
    return list(rows.values())


def _common(values: dict[str, Any]) -> Any:
    """The value that all records have; if they differ, each value with the name of its record."""
    first = next(iter(values.values()))
    if all(value == first for value in values.values()):
        return first
    return " / ".join(f"{value} ({name})" for name, value in values.items())


def _common_values(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for value in values.values() for key in value)
    return {key: _common({name: value.get(key) for name, value in values.items()}) for key in keys}


def _fall(values: dict[str, tuple[float, float]], max_drop: float) -> str | None:
    """A message about an average that fell by more than ``max_drop`` points, else None; ``values``: before, after."""
    old, new = (sum(pair[which] for pair in values.values()) / len(values) for which in (0, 1))
    if old - new <= max_drop + 1e-9:  # less than that is rounding
        return None
    changes = sorted((after - before, name) for name, (before, after) in values.items() if after < before)
    falls = ", ".join(f"{name} ({change:+.1f})" for change, name in changes[:_NAMED])
    number = "1 benchmark" if len(values) == 1 else f"{len(values)} benchmarks"
    return (
        f"average fell by {old - new:.4g} points ({old:.1f} to {new:.1f}) over {number}, more than --max-drop "
        f"{max_drop:g}; most on {falls}"
    )
