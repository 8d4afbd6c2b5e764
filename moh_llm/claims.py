"""Sentences about a model, each made of typed record fields by one function.

Cards, reports, logs and the last lines of commands print these sentences. A function returns None where the records do
not support its sentence. Text that only the card has is in its template, `moh_llm/hub/templates/card.md`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.intervals import show_error, show_figure
from moh_llm.records.evaluation import EvaluationRecord, Share
from moh_llm.records.run import Scores

# ---- a conversion


def planned_heads(active: Sequence[float], heads: int, start: int) -> str:
    """Heads that a plan has on, mean over layers, of `heads`, after the `start` first tokens of a document."""
    spread = "" if len(set(active)) == 1 else f", {min(active)} to {max(active)} by layer"
    late = f" after the first {start:,} tokens" if start else ""
    return f"{sum(active) / len(active):.4g} of {heads} heads on{late}{spread}"


# ---- a training run


def held_out_scores(scores: Scores) -> str:
    """Scores on held-out text, as a clause for a line of the terminal."""
    text = f"perplexity {scores.perplexity:.2f}"
    if scores.reference is not None:
        kl = show_figure(scores.kl, scores.kl_interval, ".4f")
        text += f", the {scores.reference}'s {scores.reference_perplexity:.2f}; KL {kl}"
    return text


# ---- an evaluation


def verdict(report: EvaluationRecord, label: str, called: str | None = None) -> str:
    """The share of the base's average, and of its margin over chance, that a model keeps; without a base its average.

    What limits the figures, such as too few items, comes first in the sentence, so that nobody quotes them without it.
    ``called`` is how the sentence calls the model, if not by its label.
    """
    average, name = report.average, called or label
    model, base = (average.scores.get(which) for which in (label, "base"))
    some = "" if average.over == average.total else f"only {average.over} of "
    on = f"on {some}{average.total} benchmark{'s' if average.total > 1 else ''}"
    share, kept = (model.recovery, model.margin_kept) if model else (None, None)
    if model is None:
        text = f"{name} has no average: no benchmark was scored on every model"
    elif base is None or share is None or share.share is None:
        of_base = f" and base {base.value:.1f} %: a share is undefined" if base and share else ""
        text = f"{name} averages {show_error(model.value, model.stderr, '.1f', '.1f')} % {on}{of_base}"
    else:
        of_base = f"{model.value:.1f} of {base.value:.1f}; {_spread(share)}"
        text = f"{name} scores {share.share:.1f} % of base's average ({of_base}) {on}"
        if kept and kept.share is not None:
            above = "" if kept.over == average.over else f" on {kept.over} of them"
            text += f", and {kept.share:.1f} % of its margin over chance ({_spread(kept)}){above}"
    if report.limit is not None:
        return f"ONLY {report.limit} ITEM{'S' if report.limit > 1 else ''} A TASK (--limit): {text}."
    if model and not report.partial_data and not report.results(label):
        return f"ONLY A SMOKE TEST, TOO SMALL TO TELL QUALITY: {text}."
    return f"ONLY PART OF THE ITEMS: {text}." if report.partial_data else f"{text}."


def _spread(share: Share) -> str:
    if share.base_errors is not None:
        return f"no interval: base's is {share.base_errors:.1f} standard errors above zero"
    if share.interval is None:
        return "interval not known"
    return f"95 % interval {share.interval[0]:.1f} to {share.interval[1]:.1f} %"


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
    return found


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


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
