"""The root's evaluate.py runs as a script and steps aside as a module."""

from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parents[2]


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
