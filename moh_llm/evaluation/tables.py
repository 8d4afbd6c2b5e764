"""Sections on an evaluation for reports and model cards: sentences, one table, models, settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.claims.evaluation import verdict, warnings
from moh_llm.evaluation.document import Block, Bullets, Caution, Code, Details, Inline, Paragraph, Table
from moh_llm.evaluation.margin import CHANCE, MARGIN, NOT_CLEAR, show_share
from moh_llm.intervals import show_error, show_figure, show_number, within
from moh_llm.records.conversion import PositionFigures, RetrievalFigures
from moh_llm.records.evaluation import AverageFigures, EvaluationRecord, Figures, ModelRecord, Value

_ALIKE = (
    "Where all items have the same score, or the same difference, the standard error is 0, which does not mean "
    "certainty: the 95 % interval stands in brackets in its place, and the average's error may be too small. "
)


def lead(report: EvaluationRecord) -> list[Block]:
    """Cautions first, then each model's result in a sentence."""
    labels = report.compared_models or list(report.models)
    return [
        *(Caution(claim.text) for claim in warnings(report)),
        *(Paragraph(verdict(report, label).text, strong=True) for label in labels),
    ]


def benchmark_blocks(report: EvaluationRecord, names: Mapping[str, str] | None = None) -> list[Block]:
    """The table of scores and what its figures mean.

    Args:
        report: a record made by `build_record` or `merge`.
        names: what to call the models' columns, where not by their labels; such a table leaves out what was published.
    """
    published = [] if names else report.suite.columns
    compared = {label: about.compared for label, about in report.models.items()}
    head = ["benchmark", "shots", "metric", "items", "chance"]
    for label, has_base in compared.items():
        head.append((names or {}).get(label, label))
        head += ["delta", "recovery %", "of margin %"] if has_base else []
    rows = []
    for row in report.benchmarks:
        items = next((f"{figures.items:,}" for figures in row.scores.values()), "-")
        facts = [row.name, str(row.shots), row.metric + (" *" if row.note else ""), items]
        cells = _cells(row.scores, row.published, compared, published)
        rows.append([*facts, show_number(row.chance, ".1f"), *cells])
    average = report.average
    over = "average" if average.over == average.total else f"average of {average.over} of {average.total}"
    rows.append([over, "", "", "", "", *_cells(average.scores, average.published, compared, published)])
    note = (
        f"{report.suite.title}: in percent; ± is one standard error (none for a single item). The delta is to "
        "the base, its error that of the differences on the same items. The average counts every benchmark alike. "
        f"{_ALIKE if _any_alike(report) else ''}"
        f"Every model was computed in {report.dtype}"
    )
    stored = {label: about.stored_dtype for label, about in report.models.items() if about.stored_dtype != about.dtype}
    named = ", ".join(f"{label} is stored in {dtype}" for label, dtype in stored.items() if dtype)
    note += f"; {named}." if named else "."
    if any(compared.values()):
        note += (
            " The 95 % intervals of both shares are by Fieller's method, from those of both averages and of their "
            "difference on the same items: they stand for the choice of items, not of benchmarks. "
            f"{CHANCE} {MARGIN}"
        )
        note += f" {NOT_CLEAR}" if any("†" in cell for row in rows for cell in row) else ""
    blocks: list[Block] = [
        Table([*head, *(f"paper: {column}" for column in published)], rows, total=True),
        Paragraph(note),
    ]
    if inferred := [f"{row.name}: {row.note}" for row in report.benchmarks if row.note]:
        blocks.append(Details("* The metric is inferred, not stated by the paper", [Bullets(inferred)]))
    return blocks


def long_context_tables(by_position: Sequence[PositionFigures], retrieval: Sequence[RetrievalFigures]) -> list[Table]:
    """The converted model by position, and what it finds out of its fallbacks' sight; no table without figures."""
    tables = []
    if by_position:
        rows: list[list[Inline]] = [
            [f"from {part.start}", f"{part.tokens:,}", f"{part.perplexity_ratio:#.5g}", f"{part.kl:#.3g}"]
            for part in by_position
        ]
        tables.append(Table(["position in the document", "tokens", "ratio to base's", "KL to base, nats"], rows))
    if retrieval:
        rows = [[one.task, str(one.asked), str(one.base), str(one.converted)] for one in retrieval]
        tables.append(
            Table(["out of the fallbacks' sight", "asked", "the base finds", "the converted model finds"], rows)
        )
    return tables


def model_table(report: EvaluationRecord) -> Table:
    """A column for each model: where it is from, its heads, its weights, what ran it."""
    columns = [_model_facts(about) for about in report.models.values()]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows: list[list[Inline]] = [[key, *(column.get(key, "-") for column in columns)] for key in keys]
    return Table(["", *report.models], rows, text=1 + len(columns), kind="models")


def settings(report: EvaluationRecord) -> list[tuple[str, Inline]]:
    """Settings of the scores; a merged evaluation may have several values."""
    return [
        ("data", report.data),
        ("compute dtype of every model", report.dtype),
        ("batch size", str(report.batch_size)),
        ("prefixes shared", "yes" if report.share_prefixes else "no"),
        ("processes", str(report.processes)),
        ("seeds", ", ".join(f"{name} {seed}" for name, seed in report.seeds.items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())),
        ("made", report.created),
    ]


def _model_facts(about: ModelRecord) -> dict[str, Inline]:
    found: dict[str, Any] = {"from": Code(about.model), "type": about.model_type}
    for key, value in about.heads.items():
        # Numbers by layer are shown; ids of shared heads are not.
        if isinstance(value, list):
            found[key] = ", ".join(map(str, value)) if all(isinstance(n, int) for n in value) else None
        elif value is not None and not isinstance(value, dict):
            found[key] = str(value)
    digest, commit = about.weights_sha256, about.revision
    found |= {"weights (SHA-256)": digest and Code(digest), "commit on the Hub": commit and Code(commit)}
    found |= {"computed in": about.dtype, "stored in": about.stored_dtype, "device": about.device}
    found |= {"hardware": about.hardware, "context": f"{about.context:,} tokens"}
    found["scored"] = f"{about.items:,} items in {about.seconds:,.0f} s"
    found["records"] = tuple(part for record in about.records for part in (Code(record), " "))[:-1]
    return {key: value for key, value in found.items() if value}


def _cells(
    scores: Mapping[str, Figures | AverageFigures],
    reported: Mapping[str, float | None],
    compared: Mapping[str, bool],
    published: list[str],
) -> list[str]:
    """The figures of one row, from the first model to the published columns; ``compared``: whether it has a base."""
    cells = []
    for label, has_base in compared.items():
        figures = scores.get(label)
        cells.append(_show(figures))
        if has_base and figures is None:
            cells += ["-"] * 3
        elif has_base:
            margin = "at chance" if getattr(figures, "at_chance", False) else show_share(figures.margin_kept)
            cells += [_show(figures.delta, "+.1f", -100), show_share(figures.recovery), margin]
    return cells + [show_number(reported.get(column), ".1f") for column in published]


def _any_alike(report: EvaluationRecord) -> bool:
    """Whether the standard error of a score or a difference is 0, as lm-eval has it where no item differs."""
    found = [figures for row in report.benchmarks for figures in row.scores.values()]
    return any(value.stderr == 0 for figures in found for value in (figures, figures.delta) if value is not None)


def _show(value: Value | None, form: str = ".1f", lowest: float = 0) -> str:
    """A value with its standard error; with its interval, in the bounds of the value, where that error is 0."""
    if value is None:
        return "-"
    if value.stderr == 0 and value.interval is not None:
        return show_figure(value.value, within(value.interval, lowest, 100), form)
    return show_error(value.value, value.stderr, form, ".1f")
