"""Time left, and how it is spelt."""

import pytest

from moh_llm.evaluation.runner import Progress, spell_seconds


def test_time_left_follows_items_and_other_models() -> None:
    progress = Progress(["base", "model"], {"A": 10, "B": 30})
    assert progress.seconds_left() is None
    progress.done("base", "A", 5.0)
    assert progress.seconds_left() == pytest.approx(30 * 0.5 + 5.0 + 30 * 0.5)
    progress.done("base", "B", 45.0)
    assert progress.seconds_left() == pytest.approx(5.0 + 45.0)
    progress.done("model", "A", None)  # failed: it says nothing about time
    assert progress.seconds_left() == pytest.approx(45.0)
    progress.done("model", "B", 40.0)
    assert progress.seconds_left() == 0.0


@pytest.mark.parametrize(("seconds", "words"), [(8.4, "8 s"), (99, "99 s"), (840, "14 min"), (12000, "3 h 20 min")])
def test_times_are_spelt(seconds: float, words: str) -> None:
    assert spell_seconds(seconds) == words
