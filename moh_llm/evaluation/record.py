"""The record of an evaluation, `report.json`, from the scores of its items. Figures are in percent."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from moh_llm.evaluation import statistics
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.models import describe_model, other_base
from moh_llm.evaluation.processes import Finished, file_name
from moh_llm.evaluation.runner import ModelScores, Score, installed_versions
from moh_llm.evaluation.suite import HAYSTACK, Benchmark, Suite
from moh_llm.evaluation.tasks import SEEDS
from moh_llm.records.evaluation import (
    VERSION,
    Average,
    AverageFigures,
    EvaluationRecord,
    Failure,
    Figures,
    MarginAverage,
    ModelRecord,
    Row,
    SuiteRecord,
)


def build_record(
    suite: Suite, scores: dict[str, ModelScores], options: EvaluationConfig, command: str = "", processes: int = 1
) -> EvaluationRecord:
    """The record of what `score` returned, with labels from `label_models`; ``command`` repeats the evaluation."""
    from_hub = suite.data_folder(options.data_dir) is None
    rows = [_row(benchmark, scores, from_hub) for benchmark in suite.benchmarks]
    source = "Hugging Face Hub" if options.data_dir is None else str(options.data_dir)
    if all(benchmark.lengths for benchmark in suite.benchmarks):
        source = f"made, with needles in the text of {options.data_dir or HAYSTACK}"
    compared = {label: label != "base" and "base" in scores for label in scores}
    return EvaluationRecord(
        version=VERSION,
        suite=SuiteRecord(name=suite.name, title=suite.title, columns=list(suite.columns)),
        models={label: _model(result, scores["base"] if compared[label] else None) for label, result in scores.items()},
        benchmarks=rows,
        average=_average_rows(rows, compared, suite.columns),
        errors=[
            Failure(model=label, benchmark=name, error=error)
            for label, result in scores.items()
            for name, error in result.errors.items()
        ],
        limit=options.limit,
        partial_data=[] if options.limit is not None else [row.name for row in rows if row.partial],
        data="the suite's own" if suite.data else source,
        dtype=" and ".join(dict.fromkeys(result.dtype for result in scores.values())),
        batch_size=options.batch_size,
        processes=processes,
        seeds=dict(SEEDS),
        versions=installed_versions(),
        command=command,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        analysis={},
    )


def write_samples(folder: Path, report: EvaluationRecord, finished: Finished) -> None:
    """Copy the log of all scored items into ``folder``."""
    for row in report.benchmarks:
        for label in row.scores:
            finished.copy_items(label, row.name, folder / file_name(label) / f"{file_name(row.name)}.jsonl")


def _average_rows(rows: Sequence[Row], compared: dict[str, bool], columns: Sequence[str]) -> Average:
    """Plain means over the benchmarks that every model has a score on, and differences of those that are ``compared``.

    Those of the published ``columns`` are over the same benchmarks; None if a figure is missing.
    """
    complete = [
        row
        for row in rows
        if all(
            label in row.scores and (row.scores[label].delta or not has_base) for label, has_base in compared.items()
        )
    ]
    published = {column: [row.published[column] for row in complete if column in row.published] for column in columns}
    scores: dict[str, AverageFigures] = {}
    for label in compared if complete else ():
        scores[label] = AverageFigures(**statistics.mean_of([row.scores[label] for row in complete]).content())
    for label in (label for label in scores if compared[label]):
        delta = statistics.mean_of([row.scores[label].delta for row in complete])
        scores[label].delta = delta
        scores[label].recovery = statistics.kept_share(scores[label], scores["base"], delta)
        scores[label].margin_kept = _average_margin(complete, label)
    return Average(
        over=len(complete),
        total=len(rows),
        published={
            column: sum(figures) / len(figures) if figures and len(figures) == len(complete) else None
            for column, figures in published.items()
        },
        scores=scores,
    )


def _average_margin(rows: Sequence[Row], label: str) -> MarginAverage:
    """Share of the base's mean margin that a model keeps, over the benchmarks where the base is above chance."""
    above = [row for row in rows if row.scores[label].at_chance is False]
    if not above:
        return MarginAverage(share=None, over=0)
    model, base = (statistics.mean_of([row.scores[name].margin for row in above]) for name in (label, "base"))
    share = statistics.kept_share(model, base, statistics.mean_of([row.scores[label].delta for row in above]))
    return MarginAverage(**share.content(), over=len(above))


def _row(benchmark: Benchmark, scores: dict[str, ModelScores], from_hub: bool) -> Row:
    """One benchmark: the figures of each model that has a score, and their paired difference to the base."""
    name = benchmark.name
    found = {label: result.scores[name] for label, result in scores.items() if name in result.scores}
    chances = next((result.chances.get(name) for result in scores.values()), None)
    digest = next((result.data[name] for result in scores.values() if name in result.data), None)
    configs = {part.config for part in benchmark.expand()}
    figures = {label: _figures(result, chances) for label, result in found.items()}
    if "base" in found:
        for label in figures.keys() - {"base"}:
            delta = statistics.difference(found[label].strata, found["base"].strata)
            model, base, delta = figures[label], figures["base"], statistics.value_of(delta, -1, 1)
            model.delta, model.recovery = delta, statistics.kept_share(model, base, delta)
            if model.margin is not None and base.margin is not None:
                # Also where the interval is unknown: of a single item.
                model.at_chance = base.margin.interval is None or base.margin.interval[0] <= 0
                if not model.at_chance:
                    model.margin_kept = statistics.kept_share(model.margin, base.margin, delta)
    return Row(
        name=name,
        shots=benchmark.shots,
        metric=benchmark.metric if benchmark.filter == "none" else f"{benchmark.metric} ({benchmark.filter})",
        dataset=HAYSTACK if benchmark.lengths and from_hub else benchmark.dataset,
        dataset_config=configs.pop() if len(configs) == 1 else None,  # None where several are read as one benchmark
        revision=benchmark.revision if from_hub else None,
        # The Hub's is a digest of `datasets`' fingerprints, other ones in other versions of it: the commit says more.
        data_sha256=None if from_hub and not benchmark.lengths else digest,
        eval_split=benchmark.eval_split,
        fewshot_split=benchmark.fewshot_split,
        items_in_full=benchmark.items,
        chance=None if chances is None else round(100 * statistics.mean(chances), 6),
        note=benchmark.note,
        published=dict(benchmark.published),
        scores=figures,
    )


def _figures(result: Score, chances: statistics.Strata | None) -> Figures:
    chance = 0.0 if chances is None else statistics.mean(chances)
    margins = None if chances is None else statistics.difference(result.strata, chances)
    return Figures(
        **statistics.value_of(result.strata, 0, 1).content(),
        items=result.items,
        truncated=result.truncated,
        tasks={task: {"value": 100 * value, "items": items} for task, (value, items) in result.tasks.items()},
        margin=None if margins is None else statistics.value_of(margins, -chance, 1 - chance),
    )


def _model(result: ModelScores, base: ModelScores | None) -> ModelRecord:
    """A model's record and how it was run; speed is over all benchmarks that were scored."""
    items = sum(score.items for score in result.scores.values())
    seconds = sum(score.seconds for score in result.scores.values())
    return ModelRecord(
        **describe_model(result.model, result.records),
        weights_sha256=result.identity.weights,
        plan_sha256=result.identity.plan,
        revision=result.identity.revision,
        dtype=result.dtype,
        device=result.device,
        attention_backend=result.attention_backend,
        hardware=result.hardware,
        context=result.context,
        seconds=round(seconds, 2),
        items=items,
        compared=base is not None,
        other_base=base and other_base(result.records, base.model, base.identity.revision),
    )
