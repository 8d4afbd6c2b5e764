"""The verdict says what may be quoted, and what must be known first."""

import random

import pytest
from records import Scores, make_report, page_of, verdict, warnings


@pytest.fixture
def scores() -> Scores:
    """Four of five right on one benchmark, two of five on the other; the model loses one item in ten of the first."""
    easy, hard = [1.0, 1.0, 1.0, 1.0, 0.0] * 20, [1.0, 0.0, 0.0, 1.0, 0.0] * 20
    return {"base": {"Easy": easy, "Hard": hard}, "model": {"Easy": [0.0, *easy[1:10]] * 10, "Hard": list(hard)}}


def test_interval_in_the_report_and_the_verdict(scores: Scores) -> None:
    report = make_report(scores)
    average = report.average.scores["model"]
    assert average.recovery.share == pytest.approx(100 * 55 / 60)
    low, high = average.recovery.interval
    # Only the ten lost items tell the two apart, and an item more on which only one of the two is right.
    assert 91.7 - 8 < low < 91.7 - 4 and 91.7 + 4 < high < 91.7 + 8
    interval = f"95 % interval {low:.1f} to {high:.1f} %"
    # Guessing scores nothing here, so both shares are the same.
    assert verdict(report, "model") == (
        f"model keeps 91.7 % of base's average (55.0 of 60.0; {interval}) on 2 benchmarks, and 91.7 % of its margin "
        f"over chance (55.0 of 60.0 points; {interval})."
    )
    easy, hard = (row.scores["model"].recovery for row in report.benchmarks)
    assert easy.share == pytest.approx(87.5) and easy.interval[0] < 87.5 < easy.interval[1]
    assert hard.share == pytest.approx(100) and hard.interval[0] < 99 < 101 < hard.interval[1]


def test_verdicts_stand_under_the_title(scores: Scores) -> None:
    report = make_report({**scores, "other": scores["base"]})
    page = page_of(report).splitlines()
    low, high = report.average.scores["other"].recovery.interval
    interval = f"95 % interval {low:.1f} to {high:.1f} %"
    assert page[:5] == [
        "# Two benchmarks",
        "",
        f"**{verdict(report, 'model')}**",
        "",
        f"**other keeps 100.0 % of base's average (60.0 of 60.0; {interval}) on 2 benchmarks, and "
        f"100.0 % of its margin over chance (60.0 of 60.0 points; {interval}).**",
    ]
    assert "base keeps" not in page and any("Fieller" in line for line in page)


def test_without_a_base(scores: Scores) -> None:
    report = make_report({"model": scores["model"]})
    error = report.average.scores["model"].stderr
    expected = f"model averages 55.0 % (standard error {error:.1f}) on 2 benchmarks; no base was scored with it."
    assert verdict(report, "model") == expected
    assert "Fieller" not in page_of(report)


def test_missing_benchmarks_are_named(scores: Scores) -> None:
    del scores["model"]["Hard"]
    report = make_report(scores)
    assert "on only 1 of 2 benchmarks, those that every model has, and 87.5 % of its" in verdict(report, "model")
    del scores["model"]["Easy"]
    report = make_report(scores)
    assert verdict(report, "model") == "model has no average: none of 2 benchmarks was scored on every model."
    assert f"**{verdict(report, 'model')}**" in page_of(report)


def test_a_base_that_scores_nothing_has_no_share(scores: Scores) -> None:
    report = make_report({**scores, "base": {name: [0.0] * 100 for name in scores["base"]}})
    assert report.average.scores["model"].recovery.share is None
    expected = "model averages 55.0 % and base 0.0 % on 2 benchmarks; a share is undefined."
    assert verdict(report, "model") == expected


@pytest.mark.parametrize(
    ("limit", "words"),
    [(1, "1 ITEM A TASK (--limit): model keeps 50.0"), (3, "3 ITEMS A TASK (--limit): model keeps 75.0")],
)
def test_a_limit_comes_first(scores: Scores, limit: int, words: str) -> None:
    cut = {label: {name: values[:limit] for name, values in found.items()} for label, found in scores.items()}
    report = make_report(cut, limit=limit)
    assert verdict(report, "model").startswith(f"ONLY {words} % of base's average")
    assert ("interval not known" in verdict(report, "model")) == (limit == 1)


def test_part_of_the_data_comes_first(scores: Scores) -> None:
    draw = random.Random(0)
    many = {f"B{n}": [float(draw.random() < 0.5) for _ in range(100)] for n in range(5)}
    assert verdict(make_report(scores, full=250), "model").startswith(
        "ONLY PART OF THE ITEMS (Easy 100 of 250, Hard 100 of 250): model keeps"
    )
    assert "B2 100 of 250, and 2 more): model averages" in verdict(make_report({"model": many}, full=250), "model")


def test_cut_prompts_are_a_warning(scores: Scores) -> None:
    report = make_report(scores)
    assert warnings(report) == []
    for row in report.benchmarks:
        row.scores["model"].truncated = True
    expected = "Prompts longer than model's context of 64 tokens lost their beginning in Easy, Hard."
    assert warnings(report) == [expected]
    assert page_of(report).count("lost their beginning") == 1 and f"> **{expected}**" in page_of(report)


def test_items_that_scored_alike_are_no_certainty(scores: Scores) -> None:
    scores["base"]["Hard"], scores["model"]["Hard"] = [0.0] * 20, [1.0] * 20
    scores["other"] = {"Easy": [1.0] * 100, "Hard": [1.0] * 19 + [0.0]}
    report = make_report(scores, full=20)
    assert warnings(report) == [
        "All items have the same score in Easy (other), Hard (base, model): a standard error of 0 there does not "
        "mean certainty, and the standard error of the average may be too small."
    ]
    assert f"> **{warnings(report)[0]}**" in page_of(report)
    # A single item has no standard error at all.
    single = make_report({"model": {"Easy": [1.0], "Hard": [0.0]}}, full=1)
    assert warnings(single) == []
