"""Python programs in processes of their own, forked from one that has imported torch, transformers, peft and lm-eval.

A fresh interpreter spends some eight seconds of processor time on these imports. What runs is the same: a process
with a number of its own, which can be signalled and killed, with its environment, working folder and standard streams.

    done = run("train.py", "recipe.yaml", folder=ROOT, environment={"ACCELERATE_USE_CPU": "true"}, processes=2)

Programs that read their environment while they import (HF_ENDPOINT, TRITON_INTERPRET) need a fresh interpreter.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_EVALUATION = ["lm_eval.tasks", "lm_eval.models.huggingface"]  # left out where they are not installed
_context.set_forkserver_preload(["moh_llm.training.loop", "moh_llm.conversion.convert", "peft", *_EVALUATION])


@functools.cache
def _streams() -> Path:
    """A folder for what programs print, gone with this process; not made at import, since programs import this, too."""
    folder, owner = Path(tempfile.mkdtemp(prefix="forks-")), os.getpid()
    # Not with one that was forked from this one and ends before it.
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


class Program:
    """A running program; the part of `subprocess.Popen` that tests use.

    Args:
        words: what follows `python` on a command line: `-c CODE`, `-m MODULE ...` or `SCRIPT ...`.
        folder: where it runs.
        environment: variables beside this process's own.
        largest_file: the kernel refuses it files of more bytes.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        largest_file: int | None = None,
    ):
        self._said = Path(tempfile.mkdtemp(dir=_streams()))
        variables = os.environ | (environment or {})
        given = ([str(word) for word in words], str(folder), dict(variables), largest_file, str(self._said))
        self._process = _context.Process(target=_child, args=given)
        self._process.start()
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return (self._said / "out").read_text() if (self._said / "out").exists() else ""

    @property
    def stderr(self) -> str:
        """Likewise, of errors."""
        return (self._said / "err").read_text() if (self._said / "err").exists() else ""

    def poll(self) -> int | None:
        """The exit status, minus the signal's number where one ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float = 900) -> int:
        """The same when it has ended. A program that takes longer is killed, and that is an error."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"still running after {timeout} s:\n{self.stderr[-3000:]}")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it where it has not ended."""
        if self.poll() is None:
            self._process.kill()
            self._process.join()


def run(
    *words: object,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    processes: int = 1,
    largest_file: int | None = None,
    timeout: float = 900,  # of a machine that is busy; what hangs is ended
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, on several processes as `torchrun` would; where one fails, the others are ended."""
    programs = start(words, folder, environment, processes, largest_file)
    status = finish(programs, timeout)
    said = ["".join(getattr(program, name) for program in programs) for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess([*map(str, words)], status, *said)


def start(
    words: Sequence[object],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    processes: int = 1,
    largest_file: int | None = None,
) -> list[Program]:
    """The processes of such a program, which run."""
    launch = dict(environment or {})
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        launch |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0"}
    programs = []
    for rank in range(processes):
        numbered = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        programs.append(Program([str(word) for word in words], folder, launch | numbered, largest_file))
    return programs


def finish(programs: Sequence[Program], timeout: float = 900) -> int:
    """Wait for the end of all, or end them where one fails; the first status that is not 0, if any."""
    try:
        deadline = time.monotonic() + timeout
        statuses = [program.poll() for program in programs]
        while None in statuses and not any(statuses):
            assert time.monotonic() < deadline, "\n".join(program.stderr[-3000:] for program in programs)
            time.sleep(0.02)
            statuses = [program.poll() for program in programs]
        _end(programs)
        return next((status for status in statuses if status), 0)
    finally:
        for program in programs:
            program.kill()


def _end(programs: Sequence[Program]) -> None:
    """Ask for the end, and see to it after a while, as `torchrun` does."""
    for program in programs:
        if program.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                program.send_signal(signal.SIGTERM)
    for program in programs:
        with contextlib.suppress(TimeoutError):
            program.wait(30)


def _child(words: list[str], folder: str, environment: dict[str, str], largest_file: int | None, said: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        stream = os.open(f"{said}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    # As Python does: the first entry of the path is the script's folder, or the working folder.
    paths = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], ["", *paths]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], ["", *paths]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [str(Path(words[0]).resolve().parent), *paths]
        runpy.run_path(words[0], run_name="__main__")
