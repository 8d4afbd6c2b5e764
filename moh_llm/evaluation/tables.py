"""The tables of an evaluation, for reports and model cards: scores, models, settings, heads."""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.claims import planned_heads
from moh_llm.evaluation.rendering import Table, facts
from moh_llm.intervals import show_error, show_figure, show_number, within
from moh_llm.records.evaluation import AverageFigures, EvaluationRecord, Figures, ModelRecord, Share, Value


def score_table(record: EvaluationRecord, names: Mapping[str, str] | None = None) -> Table:
    """A row for each benchmark and the average, with the columns of each model and the published figures.

    A table with ``names`` of columns in place of the models' labels leaves out what was published.
    """
    published = [] if names else record.suite.columns
    head = ["benchmark", "shots", "metric", "items", "chance"]
    for label, about in record.models.items():
        head.append((names or {}).get(label, label))
        head += ["delta", "recovery %", "of margin %"] if about.compared else []
    head += [f"paper: {column}" for column in published]
    rows = []
    for row in record.benchmarks:
        items = next((f"{figures.items:,}" for figures in row.scores.values()), "-")
        about_row = [row.name, str(row.shots), row.metric + (" *" if row.note else ""), items]
        rows.append(
            [*about_row, show_number(row.chance, ".1f"), *_scores(record, row.scores, row.published, published)]
        )
    average = record.average
    over = "average" if average.over == average.total else f"average of {average.over} of {average.total}"
    rows.append([over, "", "", "", "", *_scores(record, average.scores, average.published, published)])
    return Table(head, rows, style="total")


def model_table(record: EvaluationRecord) -> Table:
    """A column for each model: its origin, heads, weights, and what computed it."""
    columns = [_model_facts(about) for about in record.models.values()]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(column.get(key, "-") for column in columns)] for key in keys]
    return Table(["", *record.models], rows, text=1 + len(columns), style="models")


def settings_table(record: EvaluationRecord) -> Table:
    """The settings of the evaluation."""
    return facts(
        [
            ("data", record.data),
            ("compute dtype of every model", record.dtype),
            ("batch size", str(record.batch_size)),
            ("processes", str(record.processes)),
            ("seeds", ", ".join(f"{name} {seed}" for name, seed in record.seeds.items())),
            ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
            ("made", record.created),
        ]
    )


def head_table(analyses: Mapping[str, dict[str, Any]]) -> Table:
    """For each model the heads per token that its config plans and that were on, and where it was timed."""
    rows = []
    for label, found in analyses.items():
        heads, load = found["heads"], found["head_load"]["load"]
        on = sum(map(sum, load)) / len(load)
        planned = planned_heads(found["num_active"], heads, found["all_heads_until"])
        figures = [planned, f"{on:.4g}", f"{on / heads:.1%}", f"{found['head_load']['tokens']:,}"]
        rows.append([label, *figures, f"{found['device']}, {found['dtype']}"])
    prompts = ["heads on, on the prompts", "of all", "tokens read"]
    return Table(["model", "heads planned", *prompts, "timed on"], rows, text=6)


def _model_facts(about: ModelRecord) -> dict[str, str]:
    found: dict[str, Any] = {"from": about.model, "type": about.model_type}
    for key, value in about.heads.items():
        # Numbers by layer are shown; ids of shared heads are not.
        if isinstance(value, list):
            found[key] = ", ".join(map(str, value)) if all(isinstance(n, int) for n in value) else None
        elif value is not None and not isinstance(value, dict):
            found[key] = str(value)
    found |= {"weights (SHA-256)": about.weights_sha256, "commit on the Hub": about.revision}
    found |= {"computed in": about.dtype, "device": about.device}
    found |= {"hardware": about.hardware, "context": f"{about.context:,} tokens"}
    found["scored"] = f"{about.items:,} items in {about.seconds:,.0f} s"
    found["records"] = ", ".join(about.records)
    return {key: value for key, value in found.items() if value}


def _scores(
    record: EvaluationRecord,
    scores: Mapping[str, Figures | AverageFigures],
    published: Mapping[str, float | None],
    columns: Sequence[str],
) -> list[str]:
    """The cells of one row from the first model to the published columns."""
    cells = []
    for label, about in record.models.items():
        figures = scores.get(label)
        cells.append(_show(figures))
        if about.compared and figures is None:
            cells += ["-"] * 3
        elif about.compared:
            margin = "at chance" if getattr(figures, "at_chance", False) else _show_share(figures.margin_kept)
            cells += [_show(figures.delta, "+.1f", -100), _show_share(figures.recovery), margin]
    return cells + [show_number(published.get(column), ".1f") for column in columns]


def _show(value: Value | None, form: str = ".1f", lowest: float = 0) -> str:
    """A value with its standard error, or with its interval where that error is 0."""
    if value is None:
        return "-"
    if value.stderr == 0 and value.interval is not None:
        return show_figure(value.value, within(value.interval, lowest, 100), form)
    return show_error(value.value, value.stderr, form, ".1f")


def _show_share(share: Share | None) -> str:
    """A table's cell; "†" marks a share whose base is too near to 0 for an interval."""
    if share is None or share.share is None:
        return "-"
    return f"{share.share:.1f}" + ("" if share.base_errors is None else " †")
