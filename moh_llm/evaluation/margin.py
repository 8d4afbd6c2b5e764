"""Shares of a base's score and of its margin over chance that a model keeps, with 95 % intervals, in percent.

A score of 30 % on four choices says little: guessing gives 25 %. The margin over chance is the score less what
guessing gives on the same items, and the share of it that a model keeps is the margin's ratio to the base's.
A benchmark on which the base's own margin may be nothing (its 95 % interval includes chance, or it lies below)
carries no information on what is kept, and stays out of the average.
"""

from collections.abc import Sequence

from moh_llm.evaluation import statistics
from moh_llm.intervals import mover_mean
from moh_llm.records.evaluation import Figures, MarginAverage, Row, Share, Value

# What reports and cards say below their tables.
CHANCE = (
    "Chance is what a uniform guess among an item's choices scores, on average over the items; 0 where the answer is "
    "written or a word is predicted."
)
MARGIN = (
    "The margin is the score less chance. A base whose 95 % interval includes chance, or lies below it, is at chance: "
    "the benchmark tells nothing of what is kept, and the average of the margins leaves it out."
)
NOT_CLEAR = "† The base's score or margin is not clear of 0: that share has no interval."


def kept_share(model: Value, base: Value, delta: Value) -> Share:
    """``model`` / ``base`` in percent with its interval; ``delta`` is their difference on the same items.

    Without an interval where the base is not clear of 0, since the share may then be anything.
    """
    if base.value <= 0:
        return Share(share=None)
    share = 100 * model.value / base.value
    if None in (model.interval, base.interval, delta.interval):
        return Share(share=share)
    halves = [(value.interval[1] - value.interval[0]) / 2 for value in (model, base, delta)]
    found = statistics.ratio_interval(model.value, base.value, *halves)
    if found is None:
        return Share(share=share, base_errors=base.value / base.stderr if base.stderr else None)
    return Share(share=share, interval=[100 * end for end in found])


def is_at_chance(margin: Value) -> bool:
    """Whether a model's score may be that of guessing: the 95 % interval of its margin is not all above 0.

    A margin without an interval (a single item) may be.
    """
    return margin.interval is None or margin.interval[0] <= 0


def compare_with_base(model: Figures, base: Figures) -> None:
    """Fill ``recovery``, ``at_chance`` and ``margin_kept`` of ``model``, which has its ``delta``."""
    if model.delta is None:
        return
    model.recovery = kept_share(model, base, model.delta)
    if model.margin is not None and base.margin is not None:
        model.at_chance = is_at_chance(base.margin)
        if not model.at_chance:
            model.margin_kept = kept_share(model.margin, base.margin, model.delta)


def average_margin(rows: Sequence[Row], label: str) -> MarginAverage:
    """Share of the base's mean margin that ``label`` keeps, over the benchmarks where the base is above chance.

    ``rows``: those that count for the average of the scores.
    """
    found = [(row, row.scores[label], row.scores["base"]) for row in rows]
    above = [(model, base) for _, model, base in found if model.at_chance is False]
    left_out = {
        "at_chance": [row.name for row, model, _ in found if model.at_chance],
        "unknown": [row.name for row, model, _ in found if model.at_chance is None],
    }
    if not above:
        return MarginAverage(share=None, model=None, base=None, over=0, total=len(rows), **left_out)
    model, base = (plain_mean([pair[which].margin for pair in above]) for which in (0, 1))
    share = kept_share(model, base, plain_mean([figures.delta for figures, _ in above]))
    means = {"model": model.value, "base": base.value, "over": len(above), "total": len(rows)}
    return MarginAverage(**share.content(), **means, **left_out)


def margin_left(pairs: Sequence[tuple[Figures, Figures]]) -> str:
    """A clause on the remaining margin over chance, over the benchmarks that were above chance before."""
    margins = [
        (before.margin.value, after.margin.value)
        for before, after in pairs
        if before.margin is not None and after.margin is not None and not is_at_chance(before.margin)
    ]
    if not margins:
        return ""
    old, new = (statistics.plain_mean(list(values)) for values in zip(*margins, strict=True))
    number = "1 benchmark" if len(margins) == 1 else f"{len(margins)} benchmarks"
    return f"; {100 * new / old:.1f} % of the margin over chance is left ({new:.1f} of {old:.1f} points over {number})"


def plain_mean(values: Sequence[Value]) -> Value:
    """Mean in which every benchmark counts the same; its interval is that of independent benchmarks."""
    intervals = [value.interval for value in values if value.interval is not None]
    numbers = [value.value for value in values]
    return Value(
        value=statistics.plain_mean(numbers),
        stderr=statistics.plain_mean_error([value.stderr for value in values]),
        interval=mover_mean(numbers, intervals) if len(intervals) == len(numbers) else None,
    )


def show_share(share: Share | None) -> str:
    """A table's cell; "†" marks a share whose base is too near to 0 for an interval."""
    if share is None or share.share is None:
        return "-"
    return f"{share.share:.1f}" + ("" if share.base_errors is None else " †")
