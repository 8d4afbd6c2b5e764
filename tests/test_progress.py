"""The bar of passes over text."""

import pytest

from moh_llm.progress import TextProgress


def test_passes_count_by_their_work(capsys):
    """A backward pass of three times the work is three quarters of the whole."""
    with TextProgress("calibrate", 1000, {"forward": 1.0, "backward": 3.0}) as bar:
        bar.advance("forward", 1000)
        assert bar.n / bar.total == pytest.approx(0.25)
        bar.advance("backward", 500)
        bar.refresh()
    assert "calibrate backward: 500 of 1,000 tokens" in (told := capsys.readouterr().err) and "62 %" in told
