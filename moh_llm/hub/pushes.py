"""Publishing what a training run makes: checked before it begins, in the background at milestones, and at its end."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import moh_llm
from moh_llm.errors import UserError
from moh_llm.hub.lineage import Lineage, read_lineage
from moh_llm.hub.publish import PublishOptions, check_publishable
from moh_llm.hub.texts import redact
from moh_llm.training.config import HubConfig, TrainConfig
from moh_llm.training.runs import check_converted

LOG = "publish.log"
_SECONDS_TO_END = 5


def check_hub(config: TrainConfig) -> None:
    """Raise UserError for what would keep the run's model from being published; nothing is asked of the Hub."""
    if config.hub is None:
        return
    began_with = Path(config.model)
    check_converted(began_with)
    # What the tuned model will have on record: the conversion goes along, an earlier run does not.
    lineage = Lineage(began_with, read_lineage(began_with).conversion, None)
    try:
        check_publishable(config.hub.repo_id, lineage, config.hub.licence)
    except UserError as error:
        told = str(error)
        for flag, name in (("--licence", "--hub.licence"), ("--repo-id", "--hub.repo_id")):
            told = told.replace(flag, name)
        raise UserError(told) from error


def run_options(hub: HubConfig, run: Path) -> PublishOptions:
    """How RUN/model is published: to the repository's main branch."""
    return PublishOptions(run / "model", hub.repo_id, hub.private, run=run, licence=hub.licence)


def milestone_options(hub: HubConfig, milestone: Path) -> PublishOptions:
    """How the model of RUN/milestones/step-N is published: to a branch of that name."""
    return replace(run_options(hub, milestone), revision=milestone.name)


def command_line(options: PublishOptions) -> str:
    """The command that publishes by itself, to be pasted into a shell."""
    return shlex.join(["moh-llm", *_arguments(options)])


class MilestonePushes:
    """Publishes milestones one after the other, each by a ``moh-llm publish`` that training does not wait for.

    It is a process, not a thread of this one: loading a model for the proof changes settings of torch and transformers
    that training depends on, and a failure there must not end the training. What it prints goes to ``publish.log`` in
    the milestone's folder, by which a later session knows what is published.

    Args:
        hub: where to.
        say: prints one line.
    """

    def __init__(self, hub: HubConfig, say: Callable[[str], None] = print):
        self._hub, self._say = hub, say
        self._pool = ThreadPoolExecutor(1)  # a thread that starts the processes and waits for them
        self._pushes: dict[Path, Future[str | None]] = {}  # why it failed, None where it did not
        self._lock, self._closed = threading.Lock(), False
        self._running: tuple[Path, subprocess.Popen[bytes]] | None = None

    def add(self, milestone: Path) -> None:
        """Publish a milestone as soon as the others are through, if it is asked for and not done already."""
        if self._hub.milestones and milestone not in self._pushes and not _is_published(milestone, self._hub):
            self._say(f"publishing {milestone.name} in the background, see {milestone / LOG}")
            self._pushes[milestone] = self._pool.submit(self._publish, milestone)

    def wait(self) -> list[str]:
        """Wait for all of them, say of each where it lies or why it does not; return the names of those that failed."""
        if not all(push.done() for push in self._pushes.values()):
            self._say("waiting for milestones to be published")
        failures = {milestone: push.result() for milestone, push in self._pushes.items()}
        for milestone, failure in failures.items():
            if failure is None:
                self._say(f"{milestone.name} is {_last_line(milestone)}")
            else:
                command = command_line(milestone_options(self._hub, milestone))
                self._say(f"{milestone.name} is not published: {failure}; try again with `{command}`")
        return [milestone.name for milestone, failure in failures.items() if failure is not None]

    def close(self) -> None:
        """Break off what is under way; the run's next session begins it anew."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
        if self._running and self._running[1].poll() is None:
            milestone, process = self._running
            process.send_signal(signal.SIGINT)  # at which it tidies up
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
            process.kill()
            self._say(f"publishing {milestone.name} was broken off; the same command begins it anew")
        self._pool.shutdown()

    def _publish(self, milestone: Path) -> str | None:
        """Why it failed, None where it did not."""
        try:
            with self._lock:
                if self._closed:
                    return "it was broken off"
                self._running = milestone, _start(milestone_options(self._hub, milestone), milestone / LOG)
        except OSError as error:  # which must not end the training
            return f"it could not be started, {error.strerror}"
        status = self._running[1].wait()
        _, error_line, reason = (last := _last_line(milestone)).partition("error: ")
        return None if status == 0 else reason if error_line else f"it ended with status {status} after {last!r}"


def _arguments(options: PublishOptions) -> list[str]:
    """The options that training sets, as arguments of ``moh-llm``."""
    arguments = ["publish", str(options.folder), "--repo-id", options.repo_id]
    given = {"--revision": options.revision, "--run": options.run, "--licence": options.licence}
    for flag, value in given.items():
        arguments += [] if value is None else [flag, str(value)]
    return arguments + ["--private"] * options.private


def _start(options: PublishOptions, log: Path) -> "subprocess.Popen[bytes]":
    """``moh-llm publish`` in a process of its own, which finds this package wherever it was imported from."""
    root = str(Path(moh_llm.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-u", "-m", "moh_llm.cli", *_arguments(options)]  # -u: errors come last in the log
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path},
        )


def _is_published(milestone: Path, hub: HubConfig) -> bool:
    """Whether the log says that the milestone is in this repository; it may be in another one."""
    address = _last_line(milestone).partition("published: ")[2]
    return address.endswith(f"/{hub.repo_id}/tree/{milestone.name}")


def _last_line(milestone: Path) -> str:
    """The last line of the log that is not empty, without secrets; empty where there is none."""
    try:
        lines = (milestone / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return redact(next((line.strip() for line in reversed(lines) if line.strip()), ""))
