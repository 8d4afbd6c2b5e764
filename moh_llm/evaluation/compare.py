"""Evaluations after the fact: read back, put side by side, checked against a baseline."""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation.margin import margin_left
from moh_llm.evaluation.models import TAKEN_LABELS
from moh_llm.evaluation.report import Record, average_record
from moh_llm.evaluation.statistics import plain_mean
from moh_llm.evaluation.verdict import base_of, compared_models, dtypes, is_base
from moh_llm.reading import read_json

# What the code that reads a record takes for granted.
_RECORD_KEYS = (
    *("suite", "models", "benchmarks", "average", "errors", "limit", "partial_data", "data", "batch_size"),
    *("processes", "seeds", "versions", "command", "created"),
)
_SETTINGS = ("data", "dtype", "batch_size", "share_prefixes")  # older records lack two of them
_MODEL_KEYS = ("model", "dtype", "context", "weights_sha256", "revision")
# What decides whether two scores on a benchmark measure the same thing.
_SAME = ("shots", "metric", "dataset", "revision", "eval_split", "fewshot_split")
# What a row says of the benchmark; all else in it is the models' figures.
_ROW_KEYS = ("name", *_SAME, "items_in_full", "note", "published")
# Older records lack these. The first is None where several are read as one, the second for data from the Hub, the
# others where the suite names no chance rule.
_NEWER = ("dataset_config", "data_sha256", "chance_rule", "chance")
_MAY_LACK = (*_NEWER, "items")

# The same weights on the same items may differ by the rounding of another batch size; in points.
_ROUNDING = 1e-6
# A drop is told with so many of the benchmarks that fell most.
_NAMED = 3

_Labels = dict[tuple[str, str], str]


def read_evaluation(folder: Path) -> Record:
    """Read the record that `moh-llm evaluate` wrote into ``folder``.

    Raises UserError for a folder that is not there or holds no report, a report of something else, one that is
    damaged, and one of an older version that lacks what is needed here.
    """
    path = folder / "report.json"
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {found}; name a folder that `moh-llm evaluate` wrote")
    if not path.is_file():
        raise UserError(f"{folder} holds no report.json; name a folder that `moh-llm evaluate` wrote")
    record = read_json(path)
    if isinstance(record, dict) and "comparison" in record:
        raise UserError(f"{path} is of training runs (`moh-llm report`); name a folder that `moh-llm evaluate` wrote")
    if not _looks_like_evaluation(record):
        raise UserError(f"{path} is not the report of an evaluation; name a folder that `moh-llm evaluate` wrote")
    missing = [key for key in _RECORD_KEYS if key not in record]
    missing += [key for about in record["models"].values() for key in _MODEL_KEYS if key not in about]
    missing += [key for row in record["benchmarks"] for key in _ROW_KEYS if key not in row]
    if missing:
        keys = ", ".join(dict.fromkeys(missing))
        raise UserError(f"{path} lacks {keys}, as an older moh-llm wrote it; evaluate again with this one")
    return record


def merge(records: dict[str, Record]) -> Record:
    """Several evaluations side by side, by the names of their folders, as one record of the same kind.

    Equal bases become one column, "base"; else each keeps its own, and each model its difference to its own (see
    `base_of`). Averages are over the benchmarks that every model has. A single record is returned as it is.

    Raises UserError when a benchmark was not scored alike in all of them.
    """
    if not records:
        raise ValueError("no records to merge")
    if len(records) == 1:
        return next(iter(records.values()))
    _check_comparable({f"in {name}": record for name, record in records.items()})
    labels = _new_labels(records)
    models = _models(records, labels)
    rows = _rows(records, labels)
    suites = [record["suite"] for record in records.values()]
    columns = list(dict.fromkeys(column for suite in suites for column in suite["columns"]))
    errors = [
        {**error, "model": labels[name, error["model"]]}
        for name, record in records.items()
        for error in record["errors"]
    ]
    partial = {benchmark for record in records.values() for benchmark in record["partial_data"]}
    merged = {
        "suite": {key: " + ".join(dict.fromkeys(suite[key] for suite in suites)) for key in ("name", "title")}
        | {"columns": columns},
        "models": models,
        "benchmarks": rows,
        "average": average_record(rows, {label: about["compared_with"] for label, about in models.items()}, columns),
        "errors": [error for number, error in enumerate(errors) if error not in errors[:number]],
        "limit": next(iter(records.values()))["limit"],
        "partial_data": [row["name"] for row in rows if row["name"] in partial],
        **{key: _common({name: r.get(key) for name, r in records.items()}) for key in _SETTINGS},
        "processes": max(record["processes"] for record in records.values()),
        **{key: _common_values({name: r[key] for name, r in records.items()}) for key in ("seeds", "versions")},
        "command": "\n".join(dict.fromkeys(record["command"] for record in records.values())),
        "created": max(record["created"] for record in records.values()),
    }
    return merged | _analysis(records, labels)


def check_regression(record: Record, baseline: Record, max_drop: float) -> list[str]:
    """One line for each model of ``record`` whose average fell by over ``max_drop`` points, or that lacks a score.

    A model is compared with that of the same label in ``baseline``, or with its only one, over the benchmarks that
    both have. Bases are not compared. Raises UserError for a ``max_drop`` that is no drop, a model without
    counterpart, and evaluations that have no benchmark in common or did not score it alike.
    """
    if not 0 <= max_drop < math.inf:
        raise UserError(f"--max-drop {max_drop} must be a number of points of 0 or more")
    _check_comparable({"in this evaluation": record, "in the baseline": baseline})
    rows = {row["name"]: row for row in record["benchmarks"]}
    if not any(row["name"] in rows for row in baseline["benchmarks"]):
        raise UserError("this evaluation and the baseline have no benchmark in common; evaluate both on one suite")
    lines = []
    for label in compared_models(record):
        counterpart = _counterpart(label, baseline)
        before = {row["name"]: row[counterpart]["value"] for row in baseline["benchmarks"] if counterpart in row}
        after = {name: rows[name][label]["value"] for name in before if label in rows.get(name, {})}
        problems = []
        if missing := [name for name in before if name not in after]:
            problems.append(f"no score on {', '.join(missing)}, which the baseline has")
        if after and (fall := _fall(before, after, max_drop)):
            old_rows = {row["name"]: row for row in baseline["benchmarks"]}
            pairs = [(old_rows[name][counterpart], rows[name][label]) for name in after]
            problems.append(fall + margin_left(pairs))
        if problems:
            lines.append(f"{label}: {'; '.join(problems)}")
    return lines


def _looks_like_evaluation(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    models, rows = record.get("models"), record.get("benchmarks")
    if not (isinstance(models, dict) and models and isinstance(rows, list) and rows):
        return False
    return all(isinstance(entry, dict) for entry in (*models.values(), *rows))


def _check_comparable(records: dict[str, Record]) -> None:
    """Raise UserError where two records, each under the words for its place, did not score a benchmark alike."""
    for (here, one), (there, other) in itertools.combinations(records.items(), 2):
        others = {row["name"]: row for row in other["benchmarks"]}
        for row in one["benchmarks"]:
            if row["name"] in others:
                facts, other_facts = _facts(one, row), _facts(other, others[row["name"]])
                for key, value in facts.items():
                    if key not in _MAY_LACK or None not in (value, other_facts[key]):
                        _check_same(f"benchmark {row['name']}: {key}", here, value, there, other_facts[key])
        _check_same("--limit", here, one["limit"], there, other["limit"])
        _check_same("dtype", here, _dtypes(one), there, _dtypes(other), "with one --dtype")


def _facts(record: Record, row: Record) -> Record:
    facts = {key: row[key] for key in _SAME} | {key: row.get(key) for key in _NEWER} | {"limit": record["limit"]}
    # Part of the data is another benchmark, too.
    return facts | {"items": max((row[label]["items"] for label in record["models"] if label in row), default=None)}


def _dtypes(record: Record) -> str:
    return " and ".join(dtypes(record))


def _check_same(what: str, here: str, value: Any, there: str, other: Any, how: str = "alike") -> None:
    if value == other:
        return
    spelt, other_spelt = ("none" if v is None else v for v in (value, other))
    raise UserError(
        f"{what} is {spelt} {here} and {other_spelt} {there}, so the scores cannot be compared; evaluate both {how}"
    )


def _new_labels(records: dict[str, Record]) -> _Labels:
    """The merged record's label for each (folder name, label)."""
    models = [(name, label) for name, record in records.items() for label in record["models"]]
    groups: list[list[tuple[str, str]]] = []
    for name, label in models:
        if is_base(records[name], label):
            alike = (g for g in groups if all(_is_same_base(records, (name, label), other) for other in g))
            if (group := next(alike, None)) is None:
                groups.append(group := [])
            group.append((name, label))
    labels: _Labels = {}
    used: set[str] = set()
    for group in groups:
        own = group[0][1] if group[0][1] != "base" else f"base ({', '.join(name for name, _ in group)})"
        label = _free("base" if len(groups) == 1 else own, used)
        labels |= dict.fromkeys(group, label)
    # A single model is called "model", whichever it is: its folder says more.
    wanted = {place: place[0] if place[1] == "model" else place[1] for place in models if place not in labels}
    times = Counter(wanted.values())
    for (name, label), new in wanted.items():
        clear = times[new] == 1 and new not in TAKEN_LABELS | used
        labels[name, label] = _free(new if clear else f"{label} ({name})", used)
    return labels


def _free(label: str, used: set[str]) -> str:
    """``label``, or with a number after it if that is in use; it is put into ``used``."""
    free = next(new for n in itertools.count(1) if (new := label if n == 1 else f"{label} {n}") not in used)
    used.add(free)
    return free


def _is_same_base(records: dict[str, Record], one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two columns are of the same weights, run alike, with equal scores wherever both have one."""
    about, other_about = (records[name]["models"][label] for name, label in (one, other))
    keys = ["weights_sha256", "revision", "dtype"]
    keys += [] if about["weights_sha256"] or about["revision"] else ["model"]  # nothing else says what it is
    if any(about[key] != other_about[key] for key in keys):
        return False
    figures, other_figures = (
        {row["name"]: row[label] for row in records[name]["benchmarks"] if label in row} for name, label in (one, other)
    )
    return all(
        math.isclose(figure["value"], other_figures[name]["value"], rel_tol=0, abs_tol=_ROUNDING)
        for name, figure in figures.items()
        if name in other_figures
    )


def _models(records: dict[str, Record], labels: _Labels) -> dict[str, Record]:
    """What is known of each model, the common base first; of a base that several have, what the first says."""
    models: dict[str, Record] = {}
    for name, record in records.items():
        for label, about in record["models"].items():
            base = base_of(record, label)
            compared = {"compared_with": None if base is None else labels[name, base]}
            models.setdefault(labels[name, label], {**about, **compared})
    return {label: models[label] for label in sorted(models, key=lambda label: label != "base")}


def _rows(records: dict[str, Record], labels: _Labels) -> list[Record]:
    """All benchmarks with the figures of all models; a base's from the first record that has them."""
    rows: dict[str, Record] = {}
    for name, record in records.items():
        for row in record["benchmarks"]:
            facts = {key: row[key] for key in (*_ROW_KEYS, *_NEWER) if key in row}
            merged = rows.setdefault(row["name"], {**facts, "published": {}})
            merged["published"] = {**row["published"], **merged["published"]}
            for label in record["models"]:
                if label in row:
                    # The items' logs lie in the evaluation's own folder.
                    figures = {key: value for key, value in row[label].items() if key != "samples"}
                    merged.setdefault(labels[name, label], figures)
    return list(rows.values())


def _analysis(records: dict[str, Record], labels: _Labels) -> Record:
    """The records of the models' analyses, where any has one."""
    found: Record = {}
    for name, record in records.items():
        for label, analysis in (record.get("analysis") or {}).items():
            found.setdefault(labels[name, label], analysis)
    return {"analysis": found} if found else {}


def _common(values: dict[str, Any]) -> Any:
    """What all records say; where they differ, each value with the name of its record."""
    first = next(iter(values.values()))
    if all(value == first for value in values.values()):
        return first
    return " / ".join(f"{value} ({name})" for name, value in values.items())


def _common_values(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for value in values.values() for key in value)
    return {key: _common({name: value.get(key) for name, value in values.items()}) for key in keys}


def _counterpart(label: str, baseline: Record) -> str:
    """The baseline's model that ``label`` is compared with."""
    models = compared_models(baseline)
    if label in models:
        return label
    if len(models) != 1:
        raise UserError(
            f"the baseline has no model {label}, only {', '.join(models) or 'a base'}; evaluate it under the same name"
        )
    return models[0]


def _fall(before: dict[str, float], after: dict[str, float], max_drop: float) -> str | None:
    """What to say of an average that fell by more than ``max_drop`` points, else None; over ``after``'s benchmarks."""
    old, new = plain_mean([before[name] for name in after]), plain_mean(list(after.values()))
    drop = old - new
    if drop <= max_drop + 1e-9:  # less than that is rounding
        return None
    # As many digits as it takes to see that it is more.
    told = next(text for digits in range(2, 12) if float(text := f"{drop:.{digits}f}") > max_drop)
    worst = sorted((name for name in after if after[name] < before[name]), key=lambda name: after[name] - before[name])
    falls = ", ".join(f"{name} ({after[name] - before[name]:+.1f})" for name in worst[:_NAMED])
    number = "1 benchmark" if len(after) == 1 else f"{len(after)} benchmarks"
    return (
        f"average fell by {told} points ({old:.1f} to {new:.1f}) over {number}, more than --max-drop {max_drop:g}; "
        f"most on {falls}"
    )
