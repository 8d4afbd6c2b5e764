"""What is kept of a base's score, and of its margin over chance, with 95 % intervals. Figures are in percent.

A score of 30 % on four choices says little: guessing gives 25 %. The margin over chance is the score less what
guessing gives on the same items, and the share of it that a model keeps is the margin's ratio to the base's.
A benchmark on which the base's own margin may be nothing (its 95 % interval includes chance, or it lies below)
carries no information on what is kept, and stays out of the average.
"""

from typing import Any

from moh_llm.evaluation import statistics

Record = dict[str, Any]

# Standard errors to either side that hold 95 % of a normal distribution.
NORMAL_95 = 1.96
# The delta method holds for a ratio whose denominator is this many standard errors from 0: there its 95 % intervals
# contain the truth in 94 to 97 % of draws; at 2 standard errors in as few as 83 %.
STEADY = 5.0

# What reports and cards say below their tables.
CHANCE = (
    "Chance is what a uniform guess among an item's choices scores, on average over the items; 0 where the answer is "
    "written or a word is predicted."
)
MARGIN = (
    "The margin is the score less chance. A base whose 95 % interval includes chance, or lies below it, is at chance: "
    "the benchmark tells nothing of what is kept, and the average of the margins leaves it out. "
    f"† The base lies fewer than {STEADY:g} standard errors above 0 or chance: too near for an interval of that "
    "share."
)


def kept_share(model: Record, base: Record, delta: Record) -> Record:
    """``model`` / ``base`` in percent with its interval: ``share``, ``interval``, ``base_errors``.

    All three hold ``value`` and ``stderr``; ``delta`` is their difference on the same items. ``share`` is None where
    the base is not above 0. ``interval`` is None where an error is unknown, or where the base lies fewer than
    `STEADY` standard errors above 0, as ``base_errors`` then tells; else that is None.
    """
    if base["value"] <= 0:
        return {"share": None, "interval": None, "base_errors": None}
    share = 100 * model["value"] / base["value"]
    error = statistics.recovery_error(model["value"], base["value"], model["stderr"], base["stderr"], delta["stderr"])
    if error is None:
        return {"share": share, "interval": None, "base_errors": None}
    if base["value"] < STEADY * base["stderr"]:
        return {"share": share, "interval": None, "base_errors": base["value"] / base["stderr"]}
    return {
        "share": share,
        "interval": [share - NORMAL_95 * error, share + NORMAL_95 * error],
        "base_errors": None,
    }


def recovery(model: Record, base: Record) -> Record:
    """`kept_share` of the scores themselves under the names that records have for it; ``model`` has its ``delta``."""
    kept = kept_share(model, base, model["delta"])
    return {
        "recovery": kept["share"],
        "recovery_interval": kept["interval"],
        "recovery_base_errors": kept["base_errors"],
    }


def is_at_chance(figures: Record) -> bool:
    """Whether a model's score on a benchmark may be that of guessing: its margin's 95 % interval is not all above 0.

    A margin without a standard error (a single item) may be.
    """
    margin = figures["margin"]
    return margin["stderr"] is None or margin["value"] - NORMAL_95 * margin["stderr"] <= 0


def margin_kept(row: Record, label: str, base: str) -> Record | None:
    """What ``label`` keeps of ``base``'s margin on one benchmark.

    None where either has no margin, or there is no difference on the same items. With ``at_chance`` true there is no
    share.
    """
    model, other = row.get(label, {}), row.get(base, {})
    if "margin" not in model or "margin" not in other or "delta" not in model:
        return None
    if is_at_chance(other):
        return {"at_chance": True, "share": None, "interval": None, "base_errors": None}
    return {"at_chance": False, **kept_share(model["margin"], other["margin"], model["delta"])}


def average_margin(rows: list[Record], label: str, base: str) -> Record:
    """What ``label`` keeps of ``base``'s mean margin over the benchmarks where the base is above chance.

    ``rows``: those that count for the average of the scores. Beside the keys of `kept_share` (with ``share`` None
    where no benchmark is left): the mean margins ``model`` and ``base``, ``over`` so many benchmarks of ``of``, and
    the names of those left out: ``at_chance``, and ``unknown`` for those without a chance level.
    """
    found = [(row, margin_kept(row, label, base)) for row in rows]
    above = [row for row, kept in found if kept is not None and not kept["at_chance"]]
    left_out = {
        "at_chance": [row["name"] for row, kept in found if kept is not None and kept["at_chance"]],
        "unknown": [row["name"] for row, kept in found if kept is None],
    }
    record = {"over": len(above), "of": len(rows), **left_out}
    if not above:
        return record | {"model": None, "base": None, "share": None, "interval": None, "base_errors": None}
    model = plain_mean([row[label]["margin"] for row in above])
    other = plain_mean([row[base]["margin"] for row in above])
    delta = plain_mean([row[label]["delta"] for row in above])
    return record | {"model": model["value"], "base": other["value"]} | kept_share(model, other, delta)


def margin_left(pairs: list[tuple[Record, Record]]) -> str:
    """What is left of the margin over chance, from figures before and after, where it was above chance before."""
    margins = [
        (before["margin"]["value"], after["margin"]["value"])
        for before, after in pairs
        if "margin" in before and "margin" in after and not is_at_chance(before)
    ]
    if not margins:
        return ""
    old, new = (statistics.plain_mean(list(values)) for values in zip(*margins, strict=True))
    number = "1 benchmark" if len(margins) == 1 else f"{len(margins)} benchmarks"
    return f"; {100 * new / old:.1f} % of the margin over chance is left ({new:.1f} of {old:.1f} points over {number})"


def plain_mean(figures: list[Record]) -> Record:
    """Mean of figures with ``value`` and ``stderr`` in which every benchmark counts the same."""
    return {
        "value": statistics.plain_mean([figure["value"] for figure in figures]),
        "stderr": statistics.plain_mean_error([figure["stderr"] for figure in figures]),
    }


def spell_recovery(figures: Record, unit: str = "") -> str:
    """A table's cell for `recovery`; "†" marks a share whose base is too near to 0 for an interval."""
    return _spell(figures.get("recovery"), figures.get("recovery_base_errors"), unit)


def spell_margin(figures: Record, unit: str = "") -> str:
    """A table's cell for a benchmark's or the average's share of the margin, marked likewise."""
    kept = figures.get("margin_kept")
    if not kept:
        return "-"
    return "at chance" if kept["at_chance"] is True else _spell(kept["share"], kept["base_errors"], unit)


def _spell(share: float | None, base_errors: float | None, unit: str) -> str:
    return "-" if share is None else f"{share:.1f}{unit}" + ("" if base_errors is None else " †")
