"""The bar of passes over text."""

import pytest

from moh_llm.conversion.layers import TextProgress


def test_passes_count_by_their_work(capsys):
    """A backward pass of three times the work is three quarters of the whole."""
    with TextProgress("calibrate", 1000, {"forward": 1.0, "backward": 3.0}) as bar:
        bar.advance("forward", 1000)
        assert bar.n / bar.total == pytest.approx(0.25)
        bar.advance("backward", 500)
        bar.refresh()
    assert "calibrate backward: 500 of 1,000 tokens" in (told := capsys.readouterr().err) and "62 %" in told


def test_fractions_do_not_pass_the_end(recwarn):
    """A layer's share of a text is a fraction of its tokens, and the sum of these may be rounded up."""
    with TextProgress("calibrate", 1000, {"forward": 1.0, "backward": 3.0}) as bar:
        for name in ("forward", "backward"):
            for _ in range(30):
                bar.advance(name, 1000 / 30 + 1e-9)
        bar.refresh()
        assert bar.n <= bar.total
    assert not [warning for warning in recwarn if "clamping" in str(warning.message)]
