"""The verdict says what must be known before a figure is quoted. Its figures: `tests/recount`."""

import pytest
from records import Scores, make_report, verdict, warnings


@pytest.fixture
def scores() -> Scores:
    """Four of five right on one benchmark, two of five on the other; the model loses one item in ten of the first."""
    easy, hard = [1.0, 1.0, 1.0, 1.0, 0.0] * 20, [1.0, 0.0, 0.0, 1.0, 0.0] * 20
    return {"base": {"Easy": easy, "Hard": hard}, "model": {"Easy": [0.0, *easy[1:10]] * 10, "Hard": list(hard)}}


def test_a_model_without_a_common_benchmark_has_no_average(scores: Scores) -> None:
    scores["model"] = {}
    assert verdict(make_report(scores), "model").startswith("model has no average")


def test_a_base_that_scores_nothing_has_no_share(scores: Scores) -> None:
    report = make_report({**scores, "base": {name: [0.0] * 100 for name in scores["base"]}})
    assert report.average.scores["model"].recovery.share is None
    assert verdict(report, "model").endswith("and base 0.0 %: a share is undefined.")


@pytest.mark.parametrize(("limit", "words"), [(1, "1 ITEM A TASK"), (3, "3 ITEMS A TASK")])
def test_a_limit_comes_first(scores: Scores, limit: int, words: str) -> None:
    cut = {label: {name: values[:limit] for name, values in found.items()} for label, found in scores.items()}
    report = make_report(cut, limit=limit)
    assert verdict(report, "model").startswith(f"ONLY {words} (--limit): ")
    assert ("interval not known" in verdict(report, "model")) == (limit == 1)


def test_part_of_the_data_comes_first(scores: Scores) -> None:
    found = verdict(make_report(scores, full=250), "model")
    assert found.startswith("ONLY PART OF THE ITEMS: ")


def test_a_smoke_test_comes_first(scores: Scores) -> None:
    few = {label: {name: values[:30] for name, values in found.items()} for label, found in scores.items()}
    assert verdict(make_report(few, full=30), "model").startswith("ONLY A SMOKE TEST, TOO SMALL TO TELL QUALITY: ")
    assert verdict(make_report(scores), "model").startswith("model scores ")


def test_a_whole_evaluation_needs_no_warning(scores: Scores) -> None:
    assert warnings(make_report(scores)) == []
    assert len(warnings(make_report(scores, full=250))) == 1
