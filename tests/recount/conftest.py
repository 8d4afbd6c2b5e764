"""The three models, made once for all tests, and what was computed of them so far."""

from collections.abc import Callable
from pathlib import Path

import pytest

from recount.models import make_base, make_model, make_report
from recount.training import Run


@pytest.fixture(scope="session")
def recount_of(made_once: Callable[..., Path]) -> Callable[..., Run]:
    """`recount_of(kind, report=False)`: a model, converted and tuned, with `report` also evaluated; read only."""
    found: dict[str, Run] = {}

    def base(folder: Path) -> None:
        place(folder).mkdir()
        make_base(place(folder))

    def place(folder: Path) -> Path:
        return folder.parent / "recount"  # not within it: it is renamed, and records name paths

    def recount(kind: str, report: bool = False) -> Run:
        if kind not in found:
            made = found[kind] = Run(kind, place(made_once("recount-base", base)) / kind)
            made_once(f"recount-{kind}", lambda _: make_model(made))
        if report:
            made_once(f"recount-{kind}-report", lambda _: make_report(found[kind]))
        return found[kind]

    return recount


@pytest.fixture(autouse=True)
def pictures(unrendered: None) -> None:
    """No test here looks at them."""
