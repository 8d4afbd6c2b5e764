"""One writer per output folder, also when writers are killed, and each command that writes one."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import builds
import pytest
import yaml

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.locking import lock_folder

ROOT = Path(__file__).resolve().parents[1]
HOLD = """
import os, sys, time
from pathlib import Path
from moh_llm.locking import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


@contextlib.contextmanager
def holder(folder: Path, *words: str) -> Iterator[subprocess.Popen]:
    """Another process that holds the lock of ``folder``; it prints one line first."""
    command = [sys.executable, "-c", HOLD, str(folder), *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        process.said = process.stdout.readline().strip()
        assert process.said
        yield process
    finally:
        process.kill()
        process.communicate()


def assert_free(folder: Path) -> None:
    """In another process, since this one's own locks would not stand in its way."""
    code = (
        "import sys; from pathlib import Path; from moh_llm.locking import *\nwith lock_folder(Path(sys.argv[1])): pass"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True)


def test_a_second_writer_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with holder(tmp_path / "out"):
        for name in ("out", "link"):
            with pytest.raises(UserError) as refused, lock_folder(tmp_path / name):
                pytest.fail("two writers")
            assert f"{name} is being written by another process;" in str(refused.value)
        with lock_folder(tmp_path / "other"):
            pass


def test_the_lock_is_held_until_the_outermost_block_ends_and_leaves_nothing(tmp_path):
    with lock_folder(tmp_path / "out"):
        with lock_folder(tmp_path / "out"):
            pass
        with pytest.raises(subprocess.CalledProcessError):
            assert_free(tmp_path / "out")
    assert_free(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writers_lock_is_free_at_once(tmp_path):
    with holder(tmp_path / "out") as first:
        first.kill()
        first.wait()
        assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
        with lock_folder(tmp_path / "out"):
            pass
    assert list(tmp_path.iterdir()) == []


def test_waiting_for_another_writer(tmp_path):
    with holder(tmp_path / "out") as first:
        code = f"{HOLD.split('with')[0]}\nwith lock_folder(Path(sys.argv[1]), wait=True): print('mine')"
        second = subprocess.Popen([sys.executable, "-c", code, tmp_path / "out"], cwd=ROOT, stdout=subprocess.PIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        first.kill()
        assert second.communicate()[0] == b"mine\n" and second.returncode == 0


def test_a_place_where_no_lock_can_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="name another place"),
        lock_folder(tmp_path / "file/out"),
    ):
        pytest.fail("nothing is locked")


def test_a_builds_lock_stays_while_another_run_of_pytest_may_be_compiling(tmp_path):
    lock = tmp_path / "builds" / "extension" / "lock"
    first = builds.enter(tmp_path / "builds")
    lock.parent.mkdir()
    lock.touch()
    second = builds.enter(tmp_path / "builds")
    assert lock.exists()
    os.close(first)
    os.close(second)
    os.close(builds.enter(tmp_path / "builds"))
    assert not lock.exists()


# ---- the commands


@pytest.fixture(scope="module")
def inputs(made_once: Callable[..., Path], make_llama: Callable[..., Path], river: Path) -> Path:
    """A base, its conversion `moh`, and an architecture."""

    def make(folder: Path) -> None:
        (folder / "base").symlink_to(make_llama(max_position_embeddings=64))
        (folder / "tiny.yaml").write_text(yaml.safe_dump(SIZES | {"num_attention_heads": 2}))
        text = ["--calibration", str(river), "--calibration-tokens", "1024", "--heldout-tokens", "256"]
        assert main(["convert", str(folder / "base"), "--output-dir", str(folder / "moh"), *text]) == 0

    return made_once("locked", make)


@pytest.fixture(scope="module")
def run(inputs: Path, river: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished training run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(commands(inputs, river, folder)["train"]) == 0
    return folder


def commands(inputs: Path, river: Path, output: Path) -> dict[str, list[str]]:
    """A command line of each command that writes a folder."""
    base, moh = str(inputs / "base"), str(inputs / "moh")
    mixture, recipe = output.parent / "mixture.yaml", output.parent / "recipe.yaml"
    output.parent.mkdir(parents=True, exist_ok=True)
    mixture.write_text(yaml.safe_dump({"name": "river", "sources": {"river": {"weight": 1.0, "files": str(river)}}}))
    settings = {"model": moh, "output_dir": str(output), "max_steps": 2, "report_to": []}
    settings |= {"data": {"mixture": str(mixture), "sequence_length": 32, "batch_size": 2, "micro_batch_size": 1}}
    settings |= {"schedule": {"warmup_steps": 1}}
    recipe.write_text(yaml.safe_dump(settings | {"evaluation": {"eval_steps": 0, "max_tokens": 64}}))
    to = ["--output-dir", str(output)]
    text = ["--calibration", str(river), "--calibration-tokens", "1024", "--heldout-tokens", "256"]
    return {
        "convert": ["convert", base, *to, *text],
        "dense": ["convert", moh, "--to-dense", *to],
        "tokenize": ["tokenize", str(mixture), "--tokenizer", base, *to, "--workers", "1"],
        "init": ["init", str(inputs / "tiny.yaml"), "--tokenizer", base, *to],
        "train": ["train", str(recipe)],
        "evaluate": ["evaluate", moh, "--suite", "smoke", "--no-analysis", *to],
        "quickstart": ["quickstart", "--base", base, *to],
        "fetch": ["data", "fetch-benchmarks", str(output)],
        "publish": ["publish", str(output), "--repo-id", "org/moh", "--licence", "apache-2.0", "--dry-run"],
    }


NAMES = ["convert", "dense", "tokenize", "init", "train", "evaluate", "quickstart", "fetch", "publish"]


@pytest.mark.parametrize("name", [*NAMES, "export"])
def test_each_command_is_refused_while_another_process_writes(name, inputs, run, river, tmp_path, capsys):
    if name in ("evaluate", "fetch"):
        pytest.importorskip("lm_eval")
    output = tmp_path / "out"
    if name == "publish":
        output.symlink_to(inputs / "moh")
    command = {
        "export": ["checkpoint", "export", str(run / "checkpoints" / "step-000002"), "--output-dir", str(output)],
        **commands(inputs, river, output),
    }[name]
    with holder(output):
        assert main(command) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "out is being written by another process; wait for it" in error
        if name != "publish":
            assert not output.exists()
    if name in ("init", "tokenize", "export"):  # when the other process has ended
        assert main(command) == 0 and output.is_dir()


def test_tasks_of_srun_that_know_nothing_of_each_other_are_refused(inputs, river, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert main(commands(inputs, river, tmp_path / "out")["train"]) == 2
    assert "error: SLURM_STEP_NUM_TASKS=4: 4 processes were started" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.lock").exists()
