"""The three models, made once for all tests, and what was computed of them so far."""

from collections.abc import Callable
from pathlib import Path

import pytest

from recount.conversion import Recount
from recount.evaluation import Evaluation
from recount.models import Model, make_base, make_model, make_report
from recount.training import Run


@pytest.fixture(scope="session")
def model_of(made_once: Callable[..., Path]) -> Callable[[str], Model]:
    """`model_of(kind)`: a model, converted and tuned, not to be changed."""

    def place(folder: Path) -> Path:
        return folder.parent / "recount"  # not within it: it is renamed, and records name paths

    def base(folder: Path) -> None:
        place(folder).mkdir()
        make_base(place(folder))

    def model(kind: str) -> Model:
        root = place(made_once("recount-base", base))
        made = Model(kind, root / kind)
        made_once(f"recount-{kind}", lambda _: make_model(made))
        return made

    return model


@pytest.fixture(scope="session")
def run_of(model_of: Callable[[str], Model]) -> Callable[[str], Run]:
    """`run_of(kind)`: the recount of its conversion and of its run."""
    found: dict[str, Run] = {}

    def run(kind: str) -> Run:
        if kind not in found:
            found[kind] = Run(Recount(model_of(kind)))
        return found[kind]

    return run


@pytest.fixture(scope="session")
def evaluation_of(made_once: Callable[..., Path], run_of: Callable[[str], Run]) -> Callable[[str], Evaluation]:
    """`evaluation_of(kind)`: the recount of its evaluation."""
    found: dict[str, Evaluation] = {}

    def evaluation(kind: str) -> Evaluation:
        if kind not in found:
            run = run_of(kind)
            made_once(f"recount-{kind}-report", lambda _: make_report(run.recount.model))
            found[kind] = Evaluation(run)
        return found[kind]

    return evaluation


@pytest.fixture(autouse=True)
def pictures(unrendered: None) -> None:
    """No test here looks at them."""
