"""The share of the margin over chance: by hand, its interval's coverage, and what is named and left out."""

import math

import numpy as np
import pytest
from records import make_report, page_of, verdict

from moh_llm.evaluation import statistics
from moh_llm.evaluation.margin import average_margin, plain_mean
from moh_llm.records.evaluation import Row, Value

EASY, HARD = [1.0, 1.0, 1.0, 1.0, 0.0] * 20, [1.0, 0.0, 0.0, 1.0, 0.0] * 20
# Of the first benchmark the model loses one item in ten: 70 and 40 of 100 against 80 and 40.
SCORES = {"base": {"Easy": EASY, "Hard": HARD}, "model": {"Easy": [0.0, *EASY[1:10]] * 10, "Hard": list(HARD)}}


def test_shares_by_hand() -> None:
    report = make_report(SCORES, chances={"Easy": 0.5, "Hard": 0.2})
    easy, hard = report.benchmarks
    assert (easy.chance, easy.chance_rule, hard.chance) == (50.0, 0.5, 20.0)
    assert easy.scores["base"].margin.value == pytest.approx(30) and easy.scores["model"].margin.value == pytest.approx(
        20
    )
    assert easy.scores["model"].margin_kept.share == pytest.approx(100 * 20 / 30)
    assert hard.scores["model"].margin_kept.share == pytest.approx(100)
    kept = report.average.scores["model"].margin_kept
    assert kept.base == pytest.approx(25) and kept.model == pytest.approx(20)
    assert kept.share == pytest.approx(80) and (kept.over, kept.total) == (2, 2)
    assert report.average.scores["model"].recovery.share == pytest.approx(100 * 55 / 60)
    # The delta method by hand: each item's (m - c) - r (b - c), over the base's mean margin; a half of each benchmark,
    # with an item more on which only the model is right, and one on which only the base is.
    variance = 0.0
    for name, chance in (("Easy", 0.5), ("Hard", 0.2)):
        pairs = [*zip(SCORES["model"][name], SCORES["base"][name], strict=True), (1, 0), (0, 1)]
        items = [(m - chance) - 0.8 * (b - chance) for m, b in pairs]
        centre = sum(items) / 102
        variance += sum((item - centre) ** 2 for item in items) / 101 / 102
    error = 100 * math.sqrt(variance) / 2 / 0.25
    assert kept.interval == pytest.approx([80 - 1.98 * error, 80 + 1.98 * error], abs=1.5)
    low, high = kept.interval
    words = f"and 80.0 % of its margin over chance (20.0 of 25.0 points; 95 % interval {low:.1f} to {high:.1f} %)."
    assert verdict(report, "model").endswith(f" on 2 benchmarks, {words}")
    assert "| Easy | 0 | acc | 100 | 50.0 | 80.0 ± 4.0 | 70.0 ± 4.6 | -10.0 ± 3.0 | 87.5 | 66.7 |" in page_of(report)
    assert "| -5.0 ± 1.5 | 91.7 | 80.0 |" in page_of(report)


def test_chance_that_varies_from_item_to_item_is_taken_off_item_by_item() -> None:
    """With two choices where the base is right and five where it is not, the margin varies less than the score."""
    draw = np.random.default_rng(0)
    base = (draw.random(200) < 0.6).astype(float)
    chance = np.where(base == 1, 0.5, 0.2)
    margin = statistics.difference([list(base)], [list(chance)])
    assert statistics.mean(margin) == pytest.approx(base.mean() - chance.mean())
    assert statistics.standard_error(margin) == pytest.approx(0.7 * (statistics.standard_error([list(base)]) or 0))


def test_a_base_at_chance_is_named_and_left_out() -> None:
    """40 of 100 with a standard error of 4.9 includes a chance of 31, but not one of 30."""
    above = make_report(SCORES, chances={"Easy": 0.5, "Hard": 0.3})
    assert above.average.scores["model"].margin_kept.at_chance == []
    report = make_report(SCORES, chances={"Easy": 0.5, "Hard": 0.31})
    kept = report.average.scores["model"].margin_kept
    assert kept.at_chance == ["Hard"] and kept.over == 1
    assert kept.share == pytest.approx(100 * 20 / 30) and report.average.scores[
        "model"
    ].recovery.share == pytest.approx(100 * 55 / 60)
    hard = report.benchmarks[1].scores["model"]
    assert hard.at_chance and hard.margin_kept is None
    assert verdict(report, "model").endswith(" on 1 of them; base is at chance on Hard.")
    assert "| 100.0 | at chance |" in page_of(report)
    below = make_report(SCORES, chances={"Easy": 0.5, "Hard": 0.6})
    assert below.average.scores["model"].margin_kept == kept
    # The model's own score does not decide: at chance itself it has lost everything.
    lost = SCORES | {"model": {"Easy": [1.0, 0.0] * 50, "Hard": HARD}}
    assert make_report(lost, chances={"Easy": 0.5, "Hard": 0.9}).average.scores["model"].margin_kept.share == 0


def test_no_benchmark_left() -> None:
    report = make_report(SCORES, chances={"Easy": 0.8})
    kept = report.average.scores["model"].margin_kept
    assert kept.share is None and kept.at_chance == ["Easy"] and kept.unknown == ["Hard"]
    assert verdict(report, "model").endswith(
        " on 2 benchmarks, and there is no margin over chance to compare; base is at chance on Easy; no chance "
        "level is known for Hard."
    )
    assert "| at chance |" in page_of(report) and "| 91.7 | - |" in page_of(report)


def test_single_items_are_at_chance() -> None:
    scores = {label: {name: values[:1] for name, values in found.items()} for label, found in SCORES.items()}
    kept = make_report(scores, limit=1).average.scores["model"].margin_kept
    assert kept.share is None and kept.at_chance == ["Easy", "Hard"]


def test_a_base_near_chance_has_a_wide_interval() -> None:
    """80 of 100, with a standard error of 4.02, lies 4.5 of them above a chance of 62."""
    report = make_report(SCORES, chances={"Easy": 0.62, "Hard": 0.6})
    kept = report.average.scores["model"].margin_kept
    assert kept.share == pytest.approx(100 * 8 / 18) and kept.over == 1
    assert kept.interval[0] < 0 < 44.4 < kept.interval[1] < 80


def test_the_scores_own_share_is_flagged_likewise() -> None:
    few = {"base": {"Rare": [1.0] * 3 + [0.0] * 97}, "model": {"Rare": [1.0] * 2 + [0.0] * 98}}
    report = make_report(few)
    recovery = report.benchmarks[0].scores["model"].recovery
    assert recovery.share == pytest.approx(200 / 3) and recovery.interval is None
    assert recovery.base_errors == pytest.approx(0.03 / math.sqrt(0.03 * 0.97 / 99))
    assert "no interval, as base's average is only 1.7 standard errors above 0" in verdict(report, "model")
    assert "| 66.7 † |" in page_of(report)


def drawn(draw: np.random.Generator, items: int, chance: float, base: float, keep: float) -> list[np.ndarray]:
    """Scores of model and base whose margins over chance are ``base`` and ``keep`` * ``base`` in expectation.

    The base knows a part of the items and guesses the others; the model forgets some that the base knows.
    """
    known = draw.random(items) < base / (1 - chance)
    remembered = known & (draw.random(items) < keep)
    guess, other = (draw.random((2, items)) < chance).astype(float)
    return [np.where(remembered, 1.0, other), np.where(known, 1.0, guess)]


def row_from(scores: list[np.ndarray], chance: float) -> Row:
    """A row as `build_record` makes it, of one benchmark's scores."""
    model, base = scores
    strata = {"model": {"A": model.tolist()}, "base": {"A": base.tolist()}}
    return make_report(strata, full=len(model), chances={"A": chance}).benchmarks[0]


@pytest.mark.slow
def test_the_interval_holds_the_truth_in_95_of_100_draws() -> None:
    draw = np.random.default_rng(0)
    suite = [(400, 0.25, 0.3, 0.8), (250, 0.5, 0.3, 0.9), (300, 0.0, 0.4, 0.7)]
    truth = 100 * sum(base * keep for _, _, base, keep in suite) / sum(base for _, _, base, _ in suite)
    held = 0
    for _ in range(500):
        rows = [row_from(drawn(draw, items, chance, base, keep), chance) for items, chance, base, keep in suite]
        kept = average_margin(rows, "model")
        assert kept.over == 3 and kept.interval is not None
        held += kept.interval[0] <= truth <= kept.interval[1]
    # 1 % is one standard error of this share.
    assert held / 500 == pytest.approx(0.95, abs=0.02)


def test_the_share_of_scores_is_no_measure_of_the_margin() -> None:
    """Half of the margin is lost, and four fifths of the score stay: what guessing gives."""
    draw = np.random.default_rng(1)
    model, base = drawn(draw, 20000, 0.5, 0.3, 0.5)
    kept = row_from([model, base], 0.5).scores["model"].margin_kept
    assert 100 * model.mean() / base.mean() == pytest.approx(81, abs=1)
    assert kept.share == pytest.approx(50, abs=2)
    half = (kept.interval[1] - kept.interval[0]) / 2
    ratios = []
    for _ in range(500):
        chosen = draw.integers(0, 20000, 20000)
        ratios.append(100 * (model[chosen].mean() - 0.5) / (base[chosen].mean() - 0.5))
    assert half / 1.96 == pytest.approx(np.std(ratios), rel=0.1)


def test_the_mean_of_figures() -> None:
    mean = plain_mean([Value(value=10.0, stderr=3.0), Value(value=20.0, stderr=4.0)])
    assert (mean.value, mean.stderr) == (15.0, 2.5)
    assert plain_mean([Value(value=10.0, stderr=None)]).stderr is None
