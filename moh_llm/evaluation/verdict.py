"""An evaluation in one sentence for each model, and which of a record's columns is whose base."""

from typing import Any

Record = dict[str, Any]

# So many benchmarks are named before "and N more".
_NAMED = 3


def base_of(report: Record, label: str) -> str | None:
    """The column that ``label`` is compared with, or None where it has no base or is one."""
    about = report["models"][label]
    if "compared_with" in about:
        return about["compared_with"]
    # Records made before several evaluations could be put side by side: only "base" can be one.
    return "base" if label != "base" and "base" in report["models"] else None


def is_base(report: Record, label: str) -> bool:
    """Whether ``label`` is the base of some model in ``report``."""
    return label == "base" or any(base_of(report, other) == label for other in report["models"])


def compared_models(report: Record) -> list[str]:
    """The labels of all models that are no base, in the report's order."""
    return [label for label in report["models"] if not is_base(report, label)]


def dtypes(report: Record) -> list[str]:
    """What the models were run in: one dtype, but for records of older versions."""
    return sorted({about["dtype"] for about in report["models"].values()})


def verdict(report: Record, label: str) -> str:
    """One sentence of plain text: what ``label`` keeps of its base's average and of its margin over chance.

    Where it has no base, its average.

    ``report`` is a record of `build_report` or `merge`. What must be known before the figures are quoted (too few
    items, missing benchmarks) is part of the sentence.
    """
    return f"{_loud_words(report)}{_sentence(report, label)}."


def warnings(report: Record) -> list[str]:
    """What a reader must know before quoting a number, a sentence each; empty where all is well."""
    found = []
    if report["limit"] is not None:
        found.append(
            f"NOT COMPARABLE: --limit {report['limit']} scored at most {report['limit']} item(s) of each task. "
            "These numbers show that the run works, not how good a model is."
        )
    if len(dtypes(report)) > 1:
        run = ", ".join(f"{label} in {about['dtype']}" for label, about in report["models"].items())
        found.append(f"NOT SCORED ALIKE: {run}. Evaluate all of them again with one --dtype.")
    if report["partial_data"]:
        found.append(
            "NOT COMPARABLE with published figures: the data holds only part of the items of "
            f"{', '.join(report['partial_data'])}."
        )
    if report["errors"]:
        failed = "; ".join(f"{e['benchmark']} on {e['model']} ({_one_line(e['error'])})" for e in report["errors"])
        found.append(f"FAILED: {failed}.")
    for label, analysis in (report.get("analysis") or {}).items():
        if "error" in analysis:
            found.append(f"NOT ANALYSED: what the heads of {label} did ({_one_line(analysis['error'])}).")
    return found + _other_bases(report) + _truncated(report) + _scored_alike(report)


def _other_bases(report: Record) -> list[str]:
    return [
        f"NOT ITS BASE: {label} was converted from {about['other_base']}, and is compared with "
        f"{report['models'][base]['model']} here."
        for label, about in report["models"].items()
        if about.get("other_base") and (base := base_of(report, label))
    ]


def _truncated(report: Record) -> list[str]:
    found = []
    for label, about in report["models"].items():
        cut = [row["name"] for row in report["benchmarks"] if row.get(label, {}).get("truncated")]
        if cut:
            found.append(
                f"Prompts longer than {label}'s context of {about['context']} tokens lost their beginning in "
                f"{', '.join(cut)}."
            )
    return found


def _scored_alike(report: Record) -> list[str]:
    """The benchmarks whose standard error is 0, as lm-eval has it where the items do not differ."""
    alike = []
    for row in report["benchmarks"]:
        # A single item has no standard error.
        if labels := [label for label in report["models"] if label in row and row[label]["stderr"] == 0]:
            alike.append(f"{row['name']} ({', '.join(labels)})")
    if not alike:
        return []
    return [
        f"All items scored alike in {', '.join(alike)}: the standard error of 0 there is no certainty, and the "
        "average's may be too small."
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _sentence(report: Record, label: str) -> str:
    average = report["average"]
    model, base = average.get(label), base_of(report, label)
    if model is None:
        every = " on every model" if len(report["models"]) > 1 else ""
        return f"{label} has no average: none of {_benchmarks(average['of'])} was scored{every}"
    if base is None:
        error = model["stderr"]
        known = "not known" if error is None else f"{error:.1f}"
        alone = "" if is_base(report, label) else "; no base was scored with it"
        return f"{label} averages {model['value']:.1f} % (standard error {known}) {_extent(report)}{alone}"
    compared = average[base]["value"]
    if model["recovery"] is None:
        return (
            f"{label} averages {model['value']:.1f} % {_extent(report)}; {base} averages {compared:.1f} %, "
            "so there is no share of it to state"
        )
    # Older records lack the last one.
    spread = _spread(model.get("recovery_interval"), model.get("recovery_base_errors"), f"{base}'s average", "0")
    return (
        f"{label} keeps {model['recovery']:.1f} % of {base}'s average "
        f"({model['value']:.1f} of {compared:.1f}; {spread}) {_extent(report)}{_margin(model, base)}"
    )


def _margin(model: Record, base: str) -> str:
    """What goes on with "and": the share of the margin over chance; nothing for records of older versions."""
    kept = model.get("margin_kept")
    if kept is None:
        return ""
    left_out = f"; {base} is at chance on {', '.join(kept['at_chance'])}" if kept["at_chance"] else ""
    left_out += f"; no chance level is known for {', '.join(kept['unknown'])}" if kept["unknown"] else ""
    if kept["share"] is None:
        return f", and there is no margin over chance to compare{left_out}"
    spread = _spread(kept["interval"], kept["base_errors"], f"{base}'s margin", "chance")
    of = "" if kept["over"] == kept["of"] else f" on {kept['over']} of them"
    return (
        f", and {kept['share']:.1f} % of its margin over chance "
        f"({kept['model']:.1f} of {kept['base']:.1f} points; {spread}){of}{left_out}"
    )


def _spread(interval: list[float] | None, base_errors: float | None, what: str, zero: str) -> str:
    if base_errors is not None:
        return f"no interval, as {what} is only {base_errors:.1f} standard errors above {zero}"
    return "interval not known" if interval is None else f"95 % interval {interval[0]:.1f} to {interval[1]:.1f} %"


def _extent(report: Record) -> str:
    average = report["average"]
    if average["over"] == average["of"]:
        return f"on {_benchmarks(average['of'])}"
    others = ", the others lacking a score" if len(report["models"]) == 1 else ", those that every model has"
    return f"on only {average['over']} of {_benchmarks(average['of'])}{others}"


def _benchmarks(number: int) -> str:
    return "1 benchmark" if number == 1 else f"{number} benchmarks"


def _loud_words(report: Record) -> str:
    """What comes first, so that nobody quotes the figures without it."""
    if report["limit"] is not None:
        return f"ONLY {report['limit']} ITEM{'S' if report['limit'] > 1 else ''} A TASK (--limit): "
    alike = "" if len(dtypes(report)) == 1 else f"NOT SCORED ALIKE ({' and '.join(dtypes(report))}): "
    if not report["partial_data"]:
        return alike
    rows = {row["name"]: row for row in report["benchmarks"]}
    parts = [_part(rows[name], list(report["models"])) for name in report["partial_data"]]
    more = [f"and {len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    return f"{alike}ONLY PART OF THE ITEMS ({', '.join(parts[:_NAMED] + more)}): "


def _part(row: Record, labels: list[str]) -> str:
    items = min(row[label]["items"] for label in labels if label in row)
    return f"{row['name']} {items} of {row['items_in_full']}"
