"""A finished run has a whole model: killed in its last stage, or damaged afterwards, it is finished anew."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import forks
import pytest
from trained import read_record, unfinish

from moh_llm.cli import main

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--max_steps=2", "--checkpoint.save_steps=1", "--evaluation.eval_steps=0", "--report_to=[]"]


@pytest.fixture(scope="session")
def finished(made_once: Callable[..., Path], write_recipe: Callable[[Path], Path]) -> Path:
    """A finished run, not to be changed."""

    def make(folder: Path) -> None:
        assert main(["train", str(write_recipe(folder)), *SHORT, "--output-dir", str(folder / "run")]) == 0

    return made_once("finished", make) / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, in `tmp_path/run`, where the fixture `recipe` points."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def model_files(run: Path) -> dict[str, bytes]:
    """The bytes of the model's files. The card is made from the records, which have times."""
    files = {path.name: path.read_bytes() for path in sorted((run / "model").iterdir())}
    assert files.pop("README.md").startswith(b"---")
    return files


def change_a_byte(run: Path) -> None:
    content = bytearray((run / "model" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "model" / "model.safetensors").write_bytes(content)


@pytest.mark.slow
def test_a_damaged_model_is_made_anew(finished, run, recipe, capsys) -> None:
    change_a_byte(run)
    assert main(["train", str(recipe), *SHORT]) == 0
    said = capsys.readouterr().out
    assert f"{run / 'model'} is damaged (model.safetensors was changed" in said
    assert "step-000002, 0 steps to go" in said and "nothing to do" not in said
    assert model_files(run) == model_files(finished)


def test_a_model_that_cannot_be_made_anew_is_named(run, recipe, capsys) -> None:
    change_a_byte(run)
    shutil.rmtree(run / "checkpoints")
    before = (run / "log.jsonl").read_bytes()
    assert main(["train", str(recipe), *SHORT]) == 2
    assert "holds no checkpoint to make it from; restore it, or pass --overwrite" in capsys.readouterr().err
    assert (run / "log.jsonl").read_bytes() == before


def test_files_of_the_users_own_do_not_make_a_model_less_whole(run, recipe, capsys) -> None:
    (run / "model" / "notes.txt").write_text("mine")
    (run / "model" / "README.md").write_text("my card")
    assert main(["train", str(recipe), *SHORT]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (run / "model" / "README.md").read_text() == "my card"


# What the last stage does, in this order; the process is killed when it gets there.
MOMENTS = {
    "among the model's files": "transformers.PreTrainedTokenizerFast.save_pretrained",
    "before it is scored": "moh_llm.training.loop.score_saved",
    "before the card": "moh_llm.hub.publish.write_local_card",
}
KILLED = """
import os, pkgutil, signal, sys
import moh_llm.hub.publish, moh_llm.training.loop, transformers
from moh_llm.cli import main
place, name = sys.argv[1].rsplit(".", 1)
setattr(pkgutil.resolve_name(place), name, lambda *a, **b: os.kill(os.getpid(), signal.SIGKILL))
sys.exit(main(["train", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_its_last_stage_the_same_command_ends_in_a_whole_model(finished, run, recipe, capsys, moment) -> None:
    unfinish(run, 2)
    words = ["-c", KILLED, MOMENTS[moment], str(recipe), *SHORT]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    killed = forks.run(*words, folder=run.parent, environment=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert read_record(run)["status"] == ("finished" if moment == "before the card" else "running")
    assert main(["train", str(recipe), *SHORT]) == 0
    assert ("nothing to do" in capsys.readouterr().out) == (moment == "before the card")
    assert model_files(run) == model_files(finished)
    assert read_record(run)["status"] == "finished"
    assert read_record(run)["evaluation"] == read_record(finished)["evaluation"]
    assert not [path for folder in (run, run.parent) for path in folder.glob(".*")]
