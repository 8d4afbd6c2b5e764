"""The bar of passes over text: tokens of the text, passes, and the time left."""

import re

import pytest

from moh_llm import progress
from moh_llm.progress import TextProgress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets; tqdm asks it for the time."""
    now = [100.0]

    class Bar(progress.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, mininterval=0, **kwargs)
            self._time, self.start_t, self.last_print_t = lambda: now[0], now[0], now[0]

    monkeypatch.setattr(progress, "tqdm", Bar)
    return now


def seconds_left(line):
    minutes, seconds = re.search(r"(\d+):(\d+) left", line).groups()
    return 60 * int(minutes) + int(seconds)


def test_time_left_follows_the_work_of_the_passes(clock, capsys):
    """A backward pass of three times the work takes three times as long; 400 s in all, as known from 5 s on."""
    with TextProgress("calibrate", 1000, {"forward": 1.0, "backward": 3.0}) as bar:
        for name, each in (("forward", 0.1), ("backward", 0.3)):
            for _ in range(20):
                clock[0] += 50 * each
                bar.advance(name, 50)
                gone = clock[0] - 100
                line = capsys.readouterr().err.split("\r")[-1]
                assert abs(seconds_left(line) - (400 - gone)) <= 1
                rate = round(1 / each)
                place = {"forward": 1, "backward": 2}[name]
                assert (
                    f"calibrate, pass {place} of 2 ({name}): " in line and f" of 1,000 tokens, {rate} tokens/s" in line
                )
        assert bar.share_done == pytest.approx(1)
    assert "1,000 of 1,000 tokens" in line


def test_nothing_is_shown_where_nothing_is_asked_for(capsys):
    with TextProgress("verify", 10, {"layers": 1.0}, show=False) as bar:
        bar.advance("layers", 5)
    assert capsys.readouterr().err == ""
