"""The root's evaluate.py runs as a script and steps aside as a module."""

import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_help() -> None:
    result = python("evaluate.py", "--help")
    assert result.returncode == 0, result.stderr
    assert "--data-dir" in result.stdout


@pytest.mark.slow
def test_bad_input_is_one_line() -> None:
    result = python("evaluate.py", "no/such/model", "--suite", "nosuch")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --suite nosuch: unknown")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", str(ROOT)], ids=["folder", "path"])
def test_import_from_the_root_gives_the_library(path: str) -> None:
    pytest.importorskip("lm_eval")
    look = (
        "import sys; assert 'evaluate' not in sys.modules; import evaluate; "
        "print(evaluate.__file__, callable(evaluate.load), sys.modules['evaluate'] is evaluate)"
    )
    result = forks.run("-c", look, folder=ROOT, environment={"PYTHONPATH": path})
    assert result.returncode == 0, result.stderr
    file, *facts = result.stdout.split()
    assert Path(file).parent.name == "evaluate" and Path(file) != ROOT / "evaluate.py"
    assert facts == ["True", "True"]


def test_command_module_is_light() -> None:
    heavy = "('torch', 'transformers', 'lm_eval')"
    look = f"import sys, moh_llm.commands.evaluate; print([name for name in {heavy} if name in sys.modules])"
    assert python("-c", look).stdout.strip() == "[]"
