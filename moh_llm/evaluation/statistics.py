"""The statistics of an evaluation: means, standard errors as lm-eval's, 95 % intervals, and the shares of a base kept.

A benchmark's scores are strata: one list of item scores (0 to 1) for each lm-eval task. They give lm-eval's group
figures, and, because base and model answer the same items, the standard error of their paired difference.

A score of 30 % on four choices says little: guessing gives 25 %. The margin over chance is the score less what guessing
gives on the same items. A benchmark on which the base's own margin may be 0 tells nothing of what a model keeps.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import Benchmark
from moh_llm.intervals import Interval, mover_mean, student_quantile
from moh_llm.records.evaluation import Share, Value

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

Strata = list[list[float]]
# The metrics of lm-eval's multiple choice that name one choice as the answer.
_PICKS = {"acc", "acc_norm", "acc_bytes", "acc_mutual_info"}
# A log-likelihood that leaves a choice without probability.
_UNLIKELY = -1e4


def mean(strata: Strata) -> float:
    """Mean over all items, which is the mean of the tasks weighted by their sizes (lm-eval's groups)."""
    return sum(map(sum, strata)) / sum(map(len, strata))


def standard_error(strata: Strata) -> float | None:
    """Standard error of `mean`; None when a stratum has fewer than two items.

    One stratum: sample standard deviation / sqrt(n). Several: the standard deviation pooled within
    the strata / sqrt(n), as lm-eval does for a group weighted by size.
    """
    if any(len(values) < 2 for values in strata):
        return None
    total = sum(len(values) for values in strata)
    pooled = sum(_squares(values) for values in strata) / (total - len(strata))
    return math.sqrt(pooled / total)


def mean_interval(strata: Strata, low: float, high: float) -> Interval | None:
    """95 % interval of `mean`, of scores or differences that lie between two bounds; None as in `standard_error`.

    Student's t, with one item more at each bound: for a difference of paired proportions the adjusted Wald interval of
    Bonett and Price (2012), for a proportion that of Agresti and Coull with two items. Where no item differs it is not
    of width zero, and it holds for scores that are no proportions, too. Newcombe's interval holds the truth in 89 % of
    draws where 2 % of 100 items differ, all to one side; see docs/evaluation.md.
    """
    if standard_error(strata) is None:
        return None
    items, raw = sum(len(values) for values in strata), mean(strata)
    centre = (items * raw + low + high) / (items + 2)
    squares = sum(_squares(values) for values in strata) + items * (raw - centre) ** 2
    squares += (low - centre) ** 2 + (high - centre) ** 2
    freedom = items - len(strata)
    half = student_quantile(0.95, freedom) * math.sqrt(squares / (freedom + 2) / (items + 2))
    return [centre - half, centre + half]


def average_readings(strata: Strata) -> Strata:
    """Several readings of the same items (TruthfulQA's mc1 and mc2) as one: the mean for each item."""
    if len({len(values) for values in strata}) != 1:
        raise ValueError(f"readings of the same items differ in number: {[len(values) for values in strata]}")
    return [[sum(readings) / len(readings) for readings in zip(*strata, strict=True)]]


def difference(model: Strata, base: Strata) -> Strata:
    """Item by item, model minus base. Both must hold the same items in the same order."""
    return [[m - b for m, b in zip(ms, bs, strict=True)] for ms, bs in zip(model, base, strict=True)]


def value_of(strata: Strata, low: float, high: float) -> Value:
    """The mean of scores or differences that lie between two bounds, in percent."""
    error, interval = standard_error(strata), mean_interval(strata, low, high)
    return Value(
        value=100 * mean(strata),
        stderr=None if error is None else 100 * error,
        interval=interval and [100 * end for end in interval],
    )


def mean_of(values: Sequence[Value]) -> Value:
    """The mean over benchmarks, of which each counts the same, as if they were independent."""
    numbers = [value.value for value in values]
    errors = [value.stderr for value in values if value.stderr is not None]
    intervals = [value.interval for value in values if value.interval is not None]
    return Value(
        value=sum(numbers) / len(numbers),
        stderr=math.sqrt(sum(error**2 for error in errors)) / len(errors) if len(errors) == len(values) else None,
        interval=mover_mean(numbers, intervals) if len(intervals) == len(values) else None,
    )


def kept_share(model: Value, base: Value, delta: Value) -> Share:
    """``model`` / ``base`` in percent with its 95 % interval; ``delta`` is their difference on the same items.

    Without an interval if the base is not clear of 0, since the share may then be anything.
    """
    if base.value <= 0:
        return Share(share=None)
    share = 100 * model.value / base.value
    if None in (model.interval, base.interval, delta.interval):
        return Share(share=share)
    halves = [(value.interval[1] - value.interval[0]) / 2 for value in (model, base, delta)]
    found = ratio_interval(model.value, base.value, *halves)
    if found is None:
        return Share(share=share, base_errors=base.value / base.stderr if base.stderr else None)
    return Share(share=share, interval=[100 * end for end in found])


def ratio_interval(model: float, base: float, model_half: float, base_half: float, half: float) -> Interval | None:
    """95 % interval of model / base, for scores of the same items, by Fieller's method; None where it has no end.

    Half the widths of the intervals of both and of their difference tell how far the two vary together:

        cov(m, b) = (h_m^2 + h_b^2 - h^2) / 2
        (m - r b)^2 <= h_m^2 - 2 r cov(m, b) + r^2 h_b^2        holds between the two ends r
    """
    covariance = (model_half**2 + base_half**2 - half**2) / 2
    squared, middle = base**2 - base_half**2, model * base - covariance
    if base <= base_half:
        return None
    # Rounding may leave a little less than nothing.
    root = math.sqrt(max(middle**2 - squared * (model**2 - model_half**2), 0.0))
    return [(middle - root) / squared, (middle + root) / squared]


def chance_scores(benchmark: Benchmark, tasks: "list[ConfigurableTask]", limit: int | None = None) -> Strata | None:
    """The expected score of a guess on each item; None if the suite has no chance rule for the benchmark.

    ``limit``: number of rows that are scored of each task. Raises UserError if the rule is "choices" and the metric is
    not the score of a choice.
    """
    if benchmark.chance is None:
        return None
    for task in tasks:
        known = callable(task.config.process_results) or benchmark.metric in _PICKS
        if benchmark.chance == "choices" and not (task.OUTPUT_TYPE == "multiple_choice" and known):
            wrong = f"{benchmark.metric} of {task.config.task}, which picks no choice"
            raise UserError(f"chance: choices does not go with {wrong}")
    strata = [[_guess(benchmark, task, row) for row in rows_of(task.task_docs[:limit])] for task in tasks]
    return average_readings(strata) if benchmark.average == "parts" else strata


def rows_of(columns: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a dict of columns, from which `datasets` reads several times as fast."""
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _guess(benchmark: Benchmark, task: "ConfigurableTask", row: dict[str, Any]) -> float:
    if benchmark.chance == "words":
        # As many words of the prompt as there are answers, drawn with replacement. Numbers and dots are no words.
        words, answers = [word for word in row["input"].split() if word[0].isalpha()], row["outputs"]
        return sum(1 - (1 - words.count(answer) / len(words)) ** len(answers) for answer in answers) / len(answers)
    if benchmark.chance != "choices":
        return float(benchmark.chance or 0.0)
    choices = task.doc_to_choice(row)
    if callable(task.config.process_results):
        return _guess_by_trying(benchmark, task, row, len(choices))
    label = task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row)
    labels = label if isinstance(label, list) else [label]
    return len({one if isinstance(one, int) else choices.index(one) for one in labels}) / len(choices)


def _guess_by_trying(benchmark: Benchmark, task: "ConfigurableTask", row: dict[str, Any], choices: int) -> float:
    """The task's own score, averaged over models that are each certain of a different choice."""
    scores = []
    for sure in range(choices):
        likelihoods = [(0.0, True) if number == sure else (_UNLIKELY, False) for number in range(choices)]
        result = task.process_results(row, likelihoods)
        if benchmark.metric not in result:
            raise UserError(f"benchmark {benchmark.name}: chance='choices' does not go with {benchmark.metric}")
        scores.append(float(result[benchmark.metric]))
    return sum(scores) / choices


def _squares(values: list[float]) -> float:
    centre = sum(values) / len(values)
    return sum((value - centre) ** 2 for value in values)
