"""An evaluation in one sentence for each model, and what a reader must know before quoting a figure."""

from moh_llm.claims.claim import Claim
from moh_llm.claims.heads import all_heads_on_prompts
from moh_llm.records.evaluation import AverageFigures, EvaluationRecord, Row, Share

# So many benchmarks are named before "and N more".
_NAMED = 3


def verdict(report: EvaluationRecord, label: str, called: str | None = None) -> Claim:
    """One sentence: the share that ``label`` keeps of the base's average and of its margin over chance.

    Where it has no base, its average. What must be known before the figures are quoted (too few items, missing
    benchmarks) is part of the sentence, which calls the model ``called`` where that is not its label.
    """
    found, average = report.average, f"average.scores.{label}"
    figures: dict[str, object] = {"average.over": found.over, "average.total": found.total}
    if model := found.scores.get(label):
        figures |= {f"{average}.value": model.value, f"{average}.stderr": model.stderr}
        for name in ("recovery", "margin_kept"):
            if share := getattr(model, name):
                figures |= {f"{average}.{name}.{key}": value for key, value in share.content().items()}
    if base := found.scores.get("base"):
        figures["average.scores.base.value"] = base.value
    return Claim("verdict", figures, f"{_caution(report)}{_sentence(report, label, called or label)}.")


def warnings(report: EvaluationRecord) -> list[Claim]:
    """What a reader must know before quoting a number; empty where all is well."""
    found = [
        limited(report),
        part_of_data(report),
        failed(report),
        *(not_analysed(report, label) for label in report.analysis),
        *(all_heads_on_prompts(found, label) for label, found in report.analysis.items()),
        *(not_what_was_made(report, label) for label in report.models),
        *(not_its_base(report, label) for label in report.models),
        *(cut_prompts(report, label) for label in report.models),
        without_spread(report),
    ]
    return [claim for claim in found if claim is not None]


def limited(report: EvaluationRecord) -> Claim | None:
    """That only some items of each task were scored."""
    if report.limit is None:
        return None
    text = (
        f"NOT COMPARABLE: --limit {report.limit} scored at most {report.limit} item(s) of each task. "
        "These numbers show that the run works, not how good a model is."
    )
    return Claim("limited", {"limit": report.limit}, text)


def part_of_data(report: EvaluationRecord) -> Claim | None:
    """That the data lacks items of some benchmarks."""
    if not report.partial_data:
        return None
    names = ", ".join(report.partial_data)
    text = f"NOT COMPARABLE with published figures: the data holds only part of the items of {names}."
    return Claim("part_of_data", {"partial_data": report.partial_data}, text)


def failed(report: EvaluationRecord) -> Claim | None:
    """The benchmarks that failed."""
    if not report.errors:
        return None
    listed = "; ".join(f"{e.benchmark} on {e.model} ({_one_line(e.error)})" for e in report.errors)
    return Claim("failed", {"errors": [e.content() for e in report.errors]}, f"FAILED: {listed}.")


def not_analysed(report: EvaluationRecord, label: str) -> Claim | None:
    """That the analysis of a model's heads failed."""
    error = report.analysis[label].get("error")
    if error is None:
        return None
    text = f"NOT ANALYSED: what the heads of {label} did ({_one_line(error)})."
    return Claim("not_analysed", {f"analysis.{label}.error": error}, text)


def not_what_was_made(report: EvaluationRecord, label: str) -> Claim | None:
    """That a model is not the one that the records in its folder describe."""
    changed = report.models[label].changed
    if changed is None:
        return None
    text = f"CHANGED: {label} is not what the records in its folder describe: {changed}."
    return Claim("not_what_was_made", {f"models.{label}.changed": changed}, text)


def not_its_base(report: EvaluationRecord, label: str) -> Claim | None:
    """That a model is compared with another base than that which it was converted from."""
    about = report.models[label]
    if not (about.other_base and about.compared):
        return None
    base = report.models["base"].model
    text = f"NOT ITS BASE: {label} was converted from {about.other_base}, and is compared with {base} here."
    return Claim("not_its_base", {f"models.{label}.other_base": about.other_base, "models.base.model": base}, text)


def cut_prompts(report: EvaluationRecord, label: str) -> Claim | None:
    """The benchmarks whose prompts were longer than a model's context."""
    cut = [row.name for row in report.benchmarks if label in row.scores and row.scores[label].truncated]
    if not cut:
        return None
    context = report.models[label].context
    text = f"Prompts longer than {label}'s context of {context} tokens lost their beginning in {', '.join(cut)}."
    return Claim("cut_prompts", {f"models.{label}.context": context, "benchmarks.truncated": cut}, text)


def without_spread(report: EvaluationRecord) -> Claim | None:
    """The benchmarks whose standard error is 0, as lm-eval has it where the items do not differ."""
    alike = {}
    for row in report.benchmarks:
        # A single item has no standard error.
        if labels := [label for label, figures in row.scores.items() if figures.stderr == 0]:
            alike[row.name] = labels
    if not alike:
        return None
    listed = ", ".join(f"{name} ({', '.join(labels)})" for name, labels in alike.items())
    text = (
        f"All items have the same score in {listed}: a standard error of 0 there does not mean certainty, and that of "
        "the average may be too small."
    )
    return Claim("without_spread", {"benchmarks.stderr": alike}, text)


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
    """What limits the figures; it precedes them, so that they are not quoted without it."""
    if report.limit is not None:
        return f"ONLY {report.limit} ITEM{'S' if report.limit > 1 else ''} A TASK (--limit): "
    parts = [_part(row) for row in report.benchmarks if row.name in report.partial_data]
    if not parts:
        return ""
    more = [f"and {len(parts) - _NAMED} more"] if len(parts) > _NAMED else []
    return f"ONLY PART OF THE ITEMS ({', '.join(parts[:_NAMED] + more)}): "


def _part(row: Row) -> str:
    return f"{row.name} {min(figures.items for figures in row.scores.values())} of {row.items_in_full}"
