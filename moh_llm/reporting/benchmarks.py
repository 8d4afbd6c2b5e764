"""What reports and model cards say of an evaluation: its sentences, one table, its models and its settings."""

from collections.abc import Mapping
from typing import Any

from moh_llm.evaluation.margin import CHANCE, MARGIN, spell_margin, spell_recovery
from moh_llm.evaluation.verdict import base_of, compared_models, dtypes, verdict, warnings
from moh_llm.intervals import show_error, show_number
from moh_llm.reporting.document import Block, Bullets, Caution, Code, Details, Inline, Paragraph, Table

Record = dict[str, Any]


def lead(report: Record) -> list[Block]:
    """What must be known before a figure is quoted, then each model's result in a sentence."""
    labels = compared_models(report) or report["models"]
    return [
        *(Caution(line) for line in warnings(report)),
        *(Paragraph(verdict(report, label), strong=True) for label in labels),
    ]


def benchmark_blocks(report: Record, names: Mapping[str, str] | None = None) -> list[Block]:
    """The table of scores and what its figures mean.

    Args:
        report: a record made by `build_report` or `merge`.
        names: what to call the models' columns, where not by their labels; such a table leaves out what was published.
    """
    published = [] if names else report["suite"]["columns"]
    compared = {label: base_of(report, label) is not None for label in report["models"]}
    head = ["benchmark", "shots", "metric", "items", "chance"]
    for label, has_base in compared.items():
        head.append((names or {}).get(label, label))
        head += ["delta", "recovery %", "of margin %"] if has_base else []
    rows = []
    for row in report["benchmarks"]:
        items = next((f"{row[label]['items']:,}" for label in compared if label in row), "-")
        facts = [row["name"], str(row["shots"]), row["metric"] + (" *" if row["note"] else ""), items]
        rows.append([*facts, show_number(row.get("chance"), ".1f"), *_cells(row, compared, published)])
    average = report["average"]
    over = "average" if average["over"] == average["of"] else f"average of {average['over']} of {average['of']}"
    rows.append([over, "", "", "", "", *_cells(average, compared, published)])
    note = (
        f"{report['suite']['title']}: in percent; ± is one standard error (none for a single item). The delta is to "
        "the base, its error that of the differences on the same items. The average counts every benchmark alike. "
        f"Every model was run in {' and '.join(dtypes(report))}."
    )
    if any(compared.values()):
        note += (
            " The intervals of both shares are 1.96 standard errors to either side, by the delta method from the "
            "errors of both averages and of their difference: they stand for the choice of items, not of benchmarks. "
            f"{CHANCE} {MARGIN}"
        )
    blocks: list[Block] = [
        Table([*head, *(f"paper: {column}" for column in published)], rows, total=True),
        Paragraph(note),
    ]
    if inferred := [f"{row['name']}: {row['note']}" for row in report["benchmarks"] if row["note"]]:
        blocks.append(Details("* The metric is inferred, not stated by the paper", [Bullets(inferred)]))
    return blocks


def model_table(report: Record) -> Table:
    """A column for each model: where it is from, its heads, its weights, what ran it."""
    columns = [_model_facts(report, label) for label in report["models"]]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows: list[list[Inline]] = [[key, *(column.get(key, "-") for column in columns)] for key in keys]
    return Table(["", *report["models"]], rows, text=1 + len(columns), kind="models")


def settings(report: Record) -> list[tuple[str, Inline]]:
    """What the scores were made with. Records of older versions lack some of it, merged ones may name several."""
    return [
        ("data", report["data"]),
        ("dtype of every model", " and ".join(dtypes(report))),
        ("batch size", str(report["batch_size"])),
        ("prefixes shared", str(report.get("share_prefixes", "not recorded"))),
        ("processes", str(report["processes"])),
        ("seeds", ", ".join(f"{name} {seed}" for name, seed in report["seeds"].items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("made", report["created"]),
    ]


def _model_facts(report: Record, label: str) -> dict[str, Inline]:
    about, base = report["models"][label], base_of(report, label)
    found: dict[str, Any] = {"from": Code(about["model"]), "type": about.get("model_type")}
    found |= {"compared with": None if base == "base" else base}
    for key, value in about.get("heads", {}).items():
        # Numbers by layer are shown; ids of shared heads are not.
        if isinstance(value, list):
            found[key] = ", ".join(map(str, value)) if all(isinstance(n, int) for n in value) else None
        elif value is not None and not isinstance(value, dict):
            found[key] = str(value)
    digest, commit = about.get("weights_sha256"), about.get("revision")
    found |= {"weights (SHA-256)": digest and Code(digest), "commit on the Hub": commit and Code(commit)}
    found |= {"dtype": about["dtype"], "stored in": about.get("stored_dtype"), "device": about.get("device")}
    found |= {"hardware": about.get("hardware"), "context": f"{about['context']:,} tokens"}
    if "items" in about:
        found["scored"] = f"{about['items']:,} items in {about['seconds']:,.0f} s"
    found["records"] = tuple(part for record in about.get("records", []) for part in (Code(record), " "))[:-1]
    return {key: value for key, value in found.items() if value}


def _cells(row: Record, compared: Mapping[str, bool], published: list[str]) -> list[str]:
    """The figures of one row, from the first model to the published columns; ``compared``: whether it has a base."""
    cells = []
    for label, has_base in compared.items():
        figures = row.get(label) or {}
        cells.append(_score(figures))
        if has_base:
            cells += [_score(figures.get("delta") or {}, "+.1f"), spell_recovery(figures), spell_margin(figures)]
    return cells + [show_number(row["published"].get(column), ".1f") for column in published]


def _score(figures: Record, form: str = ".1f") -> str:
    return show_error(figures.get("value"), figures.get("stderr"), form, ".1f")
