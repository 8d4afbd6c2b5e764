"""The report's page: a verdict, one table, and below it everything a reader must know before quoting a number."""

from typing import Any

from moh_llm.evaluation.margin import CHANCE, MARGIN, spell_margin, spell_recovery
from moh_llm.evaluation.verdict import base_of, compared_models, dtypes, verdict, warnings

Record = dict[str, Any]


def to_markdown(report: Record) -> str:
    """The page for a record made by `build_report` or `merge`."""
    verdicts = [f"**{verdict(report, label)}**" for label in compared_models(report)]
    parts = [
        f"# {report['suite']['title']}",
        *verdicts,
        _models(report),
        *(f"> **{line}**" for line in warnings(report)),
        _table(report),
    ]
    return "\n\n".join([*parts, *_footnotes(report)]) + "\n"


def _models(report: Record) -> str:
    lines = []
    for label, about in report["models"].items():
        heads = about.get("heads", {})
        shown = ("num_shared_heads", "num_active_heads", "router_type", "routing_granularity")
        known = [f"{key} {heads[key]}" for key in shown if key in heads]
        # Older records do not name the hardware.
        stored = about.get("stored_dtype")  # as do these
        dtype = about["dtype"] if stored in (None, "", about["dtype"]) else f"{about['dtype']}, stored in {stored}"
        facts = [about.get("model_type", ""), *known, dtype, about.get("hardware", "")]
        facts.append(f"context {about['context']}")
        if (base := base_of(report, label)) not in (None, "base"):
            facts.append(f"compared with {base}")
        lines.append(f"- {label}: `{about['model']}` ({', '.join(fact for fact in facts if fact)})")
        if about["weights_sha256"]:
            lines.append(f"  - weights: SHA-256 {about['weights_sha256']}")
        elif about["revision"]:
            lines.append(f"  - commit on the Hub: {about['revision']}")
        lines += [f"  - record: `{record}`" for record in about.get("records", [])]
    return "\n".join(lines)


def _table(report: Record) -> str:
    labels = list(report["models"])
    columns = report["suite"]["columns"]
    head = ["benchmark", "shots", "metric", "items", "chance"]
    compared = {label: base_of(report, label) is not None for label in labels}
    for label in labels:
        head.append(label)
        if compared[label]:
            head += ["delta", "recovery %", "of margin %"]
    head += [f"paper: {column}" for column in columns]
    body = []
    for row in report["benchmarks"]:
        mark = " *" if row["note"] else ""
        items = next((str(row[label]["items"]) for label in labels if label in row), "-")
        facts = [row["name"], str(row["shots"]), row["metric"] + mark, items, _number(row.get("chance"))]
        body.append([*facts, *_cells(row, compared, columns)])
    average = report["average"]
    over = "average" if average["over"] == average["of"] else f"average of {average['over']} of {average['of']}"
    body.append([f"**{over}**", "", "", "", "", *_cells(average, compared, columns)])
    rules = ["---", "---:", "---", *["---:"] * (len(head) - 3)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rules, *body])


def _cells(row: Record, compared: dict[str, bool], columns: list[str]) -> list[str]:
    """The figures of one row, from the first model to the published columns; ``compared``: whether it has a base."""
    cells = []
    for label, has_base in compared.items():
        cells.append(_figure(row.get(label)))
        if has_base:
            figures = row.get(label, {})
            cells += [_figure(figures.get("delta"), "+"), spell_recovery(figures), spell_margin(figures)]
    return cells + [_number(row["published"].get(column)) for column in columns]


def _figure(figure: Record | None, sign: str = "") -> str:
    """A value with its standard error: ``61.6 ± 0.4``; a dash where there is none."""
    if figure is None:
        return "-"
    error = "" if figure["stderr"] is None else f" ± {figure['stderr']:.1f}"
    return f"{figure['value']:{sign}.1f}{error}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _footnotes(report: Record) -> list[str]:
    notes = [
        "Figures are in percent; ± is one standard error (none for a single item). The delta's is that of the "
        "differences on the same items. The average counts every benchmark alike."
    ]
    if any(base_of(report, label) for label in report["models"]):
        notes[0] += (
            " The intervals of both shares are 1.96 standard errors to either side, by the delta method from the "
            "errors of both averages and of their difference: they stand for the choice of items, not of benchmarks. "
            f"{CHANCE} {MARGIN}"
        )
    inferred = [f"- {row['name']}: {row['note']}" for row in report["benchmarks"] if row["note"]]
    if inferred:
        notes.append("\\* The metric is inferred, not stated by the paper:\n\n" + "\n".join(inferred))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    processes = f" on {report['processes']} processes" if report["processes"] > 1 else ""
    shared = report.get("share_prefixes")  # older records do not say; merged ones may name several settings
    prefixes = f", prefixes shared: {shared}" if shared else ""
    notes.append(
        f"Data: {report['data']}. Every model was run in {' and '.join(dtypes(report))}. Batch size "
        f"{report['batch_size']}{prefixes}{processes}. {versions}. {report['created']}."
    )
    notes.append(f"```\n{report['command']}\n```")
    return notes
