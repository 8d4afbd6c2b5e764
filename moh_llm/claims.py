"""Sentences about a model, each made of typed record fields by one function.

Cards, reports, logs and the last lines of commands print these sentences. A function returns None where the records do
not support its sentence. Text that only the card has is in its template, `moh_llm/hub/templates/card.md`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.intervals import show_documents, show_figure
from moh_llm.records.conversion import REFERENCES, Conversion, Parameters, Verification, last_component
from moh_llm.records.evaluation import AverageFigures, EvaluationRecord, Share
from moh_llm.records.run import Scores

# ---- a conversion


def heads_read(verification: Verification | None, heads: int) -> str | None:
    """Heads per token on the held-out text of the conversion, averaged over tokens and layers.

    Args:
        verification: what the conversion measured.
        heads: number of attention heads in a layer.
    """
    if verification is None:
        return None
    read = verification.heads_read
    return (
        f"Tokens of the conversion's held-out text had {read:.4g} of {heads} heads on ({read / heads:.1%}), averaged "
        "over layers."
    )


def calibration_text(conversion: Conversion) -> str:
    """The text that routers and fallbacks were fitted to, and the share of each source."""
    calibration = conversion.calibration
    if calibration is None:
        return "The conversion fitted nothing to text."
    read, total = calibration.tokens_of_source, max(1, calibration.tokens)
    parts = [f"{last_component(name)} ({count / total:.2%})" for name, count in read.items()]
    return f"The conversion was fitted to {calibration.tokens:,} tokens from: {', '.join(parts)}."


def parameters_added(parameters: Parameters) -> str:
    """Number of weights of the base, and of those that the conversion adds."""
    return f"{parameters.dense:,} of the base, {parameters.routers:,} in routers, {parameters.fallbacks:,} in fallbacks"


# ---- a training run


def held_out_scores(scores: Scores) -> str:
    """Scores on held-out text, as a clause for a line of the terminal."""
    text = (
        f"perplexity {scores.perplexity:.3f} on {scores.tokens} held-out tokens of {show_documents(scores.documents)}"
    )
    if scores.reference is not None:
        kl = show_figure(scores.kl, scores.kl_interval, ".4f")
        text += f"; {REFERENCES[scores.reference]}: {scores.reference_perplexity:.3f}, KL to it {kl}"
    if scores.all_heads_kl is not None:
        text += f", with all heads on {scores.all_heads_kl:.4f}"
    return text


# ---- an evaluation


def verdict(report: EvaluationRecord, label: str, called: str | None = None) -> str:
    """The share of the base's average, and of its margin over chance, that a model keeps; without a base its average.

    What limits the figures, such as too few items, comes first in the sentence, so that nobody quotes them without it.

    Args:
        report: the evaluation.
        label: the model's name in it.
        called: how the sentence calls the model, if not by its label.
    """
    return f"{_caution(report)}{_sentence(report, label, called or label)}."


def warnings(report: EvaluationRecord) -> list[str]:
    """What a reader must know before quoting a number; empty if there is nothing."""
    found = []
    if report.limit is not None:
        found.append(
            f"NOT COMPARABLE: --limit {report.limit} scored at most {report.limit} item(s) of each task. "
            "These numbers show that the run works, not how good a model is."
        )
    if report.partial_data:
        names = ", ".join(report.partial_data)
        found.append(f"NOT COMPARABLE with published figures: the data holds only part of the items of {names}.")
    if report.errors:
        failed = "; ".join(f"{e.benchmark} on {e.model} ({_one_line(e.error)})" for e in report.errors)
        found.append(f"FAILED: {failed}.")
    for label, analysis in report.analysis.items():
        if (error := analysis.get("error")) is not None:
            found.append(f"NOT ANALYSED: what the heads of {label} did ({_one_line(error)}).")
        found += all_heads_on_prompts(analysis, label)
    for label, about in report.models.items():
        if about.changed is not None:
            found.append(f"CHANGED: {label} is not what the records in its folder describe: {about.changed}.")
        if about.other_base and about.compared:
            base = report.models["base"].model
            found.append(f"NOT ITS BASE: {label} was converted from {about.other_base}, and is compared with {base}.")
        if cut := [row.name for row in report.benchmarks if label in row.scores and row.scores[label].truncated]:
            found.append(
                f"Prompts longer than {label}'s context of {about.context} tokens lost their beginning in "
                f"{', '.join(cut)}."
            )
    return found + _without_spread(report)


def all_heads_on_prompts(analysis: Mapping[str, Any], label: str) -> list[str]:
    """A warning if prompts of benchmarks are no longer than the first tokens of a document, which use all heads."""
    start, read = analysis.get("all_heads_until"), analysis.get("head_load_by_text")
    names = [name for name, load in read["load"].items() if min(load) == 1] if start and read else []
    if not names:
        return []
    return [
        f"In the last layer with a router, {label} had all heads on for every token of {', '.join(names)}: the first "
        f"{start:,} tokens of a document use all heads, so these scores say little about the head plan."
    ]


def mean_heads_on(loads: Sequence[Sequence[float]]) -> float:
    """Heads on per token, averaged over layers, from the share of tokens that have each head of a layer on."""
    return sum(sum(load) for load in loads) / len(loads)


def _without_spread(report: EvaluationRecord) -> list[str]:
    """A warning if all items of a benchmark have the same score, for which lm-eval states a standard error of 0."""
    alike = []
    for row in report.benchmarks:
        # A single item has no standard error.
        if labels := [label for label, figures in row.scores.items() if figures.stderr == 0]:
            alike.append(f"{row.name} ({', '.join(labels)})")
    if not alike:
        return []
    return [
        f"All items have the same score in {', '.join(alike)}: a standard error of 0 there does not mean certainty, "
        "and the standard error of the average may be too small."
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _sentence(report: EvaluationRecord, label: str, name: str) -> str:
    model, base = report.average.scores.get(label), report.average.scores.get("base")
    if model is None:
        every = " on every model" if len(report.models) > 1 else ""
        return f"{name} has no average: none of {_benchmarks(report.average.total)} was scored{every}"
    if model.recovery is None or base is None:
        known = "not known" if model.stderr is None else f"{model.stderr:.1f}"
        alone = "" if label == "base" else "; no base was scored with it"
        return f"{name} averages {model.value:.1f} % (standard error {known}) {_extent(report)}{alone}"
    if model.recovery.share is None:
        return (
            f"{name} averages {model.value:.1f} % and base {base.value:.1f} % {_extent(report)}; a share is undefined"
        )
    keeps = "keeps" if model.recovery.share <= 100 else "scores"
    return (
        f"{name} {keeps} {model.recovery.share:.1f} % of base's average ({model.value:.1f} of {base.value:.1f}; "
        f"{_spread(model.recovery, 'average', '0')}) {_extent(report)}{_margin(model)}"
    )


def _margin(model: AverageFigures) -> str:
    """The clause after "and": the share of the margin over chance."""
    kept = model.margin_kept
    if kept is None:
        return ""
    left_out = f"; base is at chance on {', '.join(kept.at_chance)}" if kept.at_chance else ""
    left_out += f"; no chance level is known for {', '.join(kept.unknown)}" if kept.unknown else ""
    if kept.share is None:
        return f", and there is no margin over chance to compare{left_out}"
    of = "" if kept.over == kept.total else f" on {kept.over} of them"
    return (
        f", and {kept.share:.1f} % of its margin over chance ({kept.model:.1f} of {kept.base:.1f} points; "
        f"{_spread(kept, 'margin', 'chance')}){of}{left_out}"
    )


def _spread(share: Share, what: str, zero: str) -> str:
    if share.base_errors is not None:
        return f"no interval, as base's {what} is only {share.base_errors:.1f} standard errors above {zero}"
    if share.interval is None:
        return "interval not known"
    return f"95 % interval {share.interval[0]:.1f} to {share.interval[1]:.1f} %"


def _extent(report: EvaluationRecord) -> str:
    average = report.average
    if average.over == average.total:
        return f"on {_benchmarks(average.total)}"
    others = ", the others lacking a score" if len(report.models) == 1 else ", those that every model has"
    return f"on only {average.over} of {_benchmarks(average.total)}{others}"


def _benchmarks(number: int) -> str:
    return "1 benchmark" if number == 1 else f"{number} benchmarks"


def _caution(report: EvaluationRecord) -> str:
    """What limits the figures of a verdict; empty if nothing does."""
    if report.limit is not None:
        return f"ONLY {report.limit} ITEM{'S' if report.limit > 1 else ''} A TASK (--limit): "
    parts = [
        f"{row.name} {min(figures.items for figures in row.scores.values())} of {row.items_in_full}"
        for row in report.benchmarks
        if row.name in report.partial_data
    ]
    return f"ONLY PART OF THE ITEMS ({', '.join(parts)}): " if parts else ""
