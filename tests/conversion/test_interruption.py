"""A conversion that is killed, or that the disk refuses, leaves nothing that the next one trips over."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest

from moh_llm.errors import UserError
from moh_llm.files import new_folder

ROOT = Path(__file__).resolve().parents[2]
HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


@pytest.fixture(scope="module")
def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@contextlib.contextmanager
def child(code: str) -> Iterator[forks.Program]:
    """A Python process, slow for want of an accelerator, that is gone after the block."""
    process = forks.Program(["-c", code], ROOT, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()


def wait_for(pattern: str, folder: Path, process: forks.Program) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr
        time.sleep(0.005)


# As soon as there is a folder, and while the layers' inputs are written.
@pytest.mark.slow
@pytest.mark.parametrize("sign", [".moh.*.tmp", ".moh.*.tmp/hidden-states-3.safetensors"])
def test_killed_and_run_again(make_llama, convert, river, tmp_path, sign):
    base = make_llama(num_hidden_layers=8, num_attention_heads=8, hidden_size=128)
    (tmp_path / "moh").mkdir()
    (tmp_path / "moh" / "mine.txt").write_text("keep me")
    text = ["--overwrite", "--calibration", str(river), "--calibration-tokens", "65536"]
    command = ["convert", str(base), "--output-dir", str(tmp_path / "moh"), *text]
    with child(f"import sys; from moh_llm.cli import main; sys.exit(main({command!r}))") as process:
        wait_for(sign, tmp_path, process)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "moh").iterdir()] == ["mine.txt"]
    left = sorted(path.suffix for path in tmp_path.iterdir())  # by the killed process
    assert left == ["", ".lock", ".tmp"]
    assert convert(base, tmp_path / "moh", "--overwrite") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["moh"]
    assert (tmp_path / "moh" / "conversion.json").exists() and not (tmp_path / "moh" / "mine.txt").exists()


def test_a_killed_swap_is_undone(tmp_path, dead_process):
    """Killed between the two renames: the old folder has gone aside and the new one has not come."""
    output, mark = tmp_path / "moh", f".moh.{HOST}.{dead_process}"
    for ending in ("old", "tmp"):
        (tmp_path / f"{mark}.{ending}").mkdir()
        (tmp_path / f"{mark}.{ending}" / f"{ending}.txt").write_text(ending)
    with pytest.raises(UserError, match="exists and is not empty"), new_folder(output):
        pytest.fail("the old folder is back, and in the way")
    assert [path.name for path in tmp_path.iterdir()] == ["moh"]
    assert [path.name for path in output.iterdir()] == ["old.txt"]
    with new_folder(output, overwrite=True) as folder:
        (folder / "new.txt").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["moh"]
    assert [path.name for path in output.iterdir()] == ["new.txt"]


@pytest.mark.slow
def test_a_disk_that_refuses_leaves_nothing(make_llama, river, tmp_path):
    """A real refusal: the kernel lets no file of the child grow beyond 30 kB, less than the weights."""
    base = make_llama()
    flags = ["--calibration", str(river), "--calibration-tokens", "2048", "--heldout-tokens", "0"]
    command = ["convert", str(base), "--output-dir", str(tmp_path / "moh"), *flags]
    code = (
        "import resource, sys\n"
        "from moh_llm.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
        f"sys.exit(main({command!r}))\n"
    )
    done = forks.run("-c", code, folder=ROOT)
    error = done.stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
    assert done.returncode == 2, done.stderr
    assert error.startswith("error: cannot write") and "free some space" in error
