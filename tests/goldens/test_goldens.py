"""Conversions, loss curves, greedy tokens and a report are those that `frozen.json` holds.

Where the CPU's instructions or the libraries are not those of `made_with`, bits may differ. The base's tensors are then
still compared byte for byte, and losses and most figures to a tolerance; not compared are tensors that are fitted or
trained, tokens, and what single heads do, as one score that rounding moves across a threshold changes it.

A change that is meant comes with new goldens (`python -m tests.goldens.freeze`); its commit says what changes, and why.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.goldens.freeze import CONVERSIONS, FROZEN, ROOT, TRAINED

pytestmark = pytest.mark.slow  # half a minute of one core, a third of it for imports

RELATIVE, ABSOLUTE = 1e-2, 1e-3  # tolerance of figures where bits differ
OF_HEADS = re.compile(r"/(head_load|routing|analysis)\b")  # figures that are not compared there


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    return json.loads(FROZEN.read_text())


@pytest.fixture(scope="module")
def found(made_once: Callable[..., Path]) -> dict[str, Any]:
    def make(folder: Path) -> None:
        words = [sys.executable, "-m", "tests.goldens.freeze", str(folder / "found.json")]
        done = subprocess.run(words, cwd=ROOT, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]

    return json.loads((made_once("goldens", make) / "found.json").read_text())


@pytest.fixture
def is_exact(found: dict[str, Any], frozen: dict[str, Any]) -> bool:
    """Whether bits are comparable."""
    return found["made_with"] == frozen["made_with"]


def differences(found: Any, frozen: Any, is_exact: bool, path: str = "") -> Iterator[str]:
    """A line for each value that differs."""
    if isinstance(found, dict) and isinstance(frozen, dict):
        for key in sorted(found.keys() | frozen.keys()):
            yield from differences(found.get(key), frozen.get(key), is_exact, f"{path}/{key}")
    elif isinstance(found, list) and isinstance(frozen, list) and len(found) == len(frozen):
        for number, pair in enumerate(zip(found, frozen, strict=True)):
            yield from differences(*pair, is_exact, f"{path}/{number}")
    elif found != frozen and (is_exact or not (OF_HEADS.search(path) or is_near(found, frozen))):
        yield f"{path}: {found}, frozen as {frozen}"


def is_near(found: Any, frozen: Any) -> bool:
    """Whether two numbers, or texts of `float.hex`, are equal but for rounding."""
    if isinstance(found, str) and isinstance(frozen, str) and found.lstrip("-").startswith("0x"):
        found, frozen = float.fromhex(found), float.fromhex(frozen)
    numbers = isinstance(found, int | float) and isinstance(frozen, int | float)
    return numbers and math.isclose(found, frozen, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def check(found: Any, frozen: Any, is_exact: bool) -> None:
    wrong = [*differences(found, frozen, is_exact)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion(name: str, found: dict[str, Any], frozen: dict[str, Any], is_exact: bool) -> None:
    own, other = found["conversions"][name], frozen["conversions"][name]
    if not is_exact:
        assert own["base"] == other["base"] and own["fitted"].keys() == other["fitted"].keys()
        own, other = own | {"fitted": {}}, other | {"fitted": {}}
    check(own, other, is_exact)


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, found: dict[str, Any], frozen: dict[str, Any], is_exact: bool) -> None:
    own, other = found["training"][name], frozen["training"][name]
    if not is_exact:
        own, other = own | {"tensors": ""}, other | {"tensors": ""}
    check(own, other, is_exact)


def test_greedy_tokens(found: dict[str, Any], frozen: dict[str, Any], is_exact: bool) -> None:
    if not is_exact:
        pytest.skip(f"frozen with {frozen['made_with']}, and this is {found['made_with']}")
    assert found["tokens"] == frozen["tokens"]


def test_report(found: dict[str, Any], frozen: dict[str, Any], is_exact: bool) -> None:
    check({"report": found["report"]}, {"report": frozen["report"]}, is_exact)
