"""Publishing what a training run makes: checked before it begins, in the background at milestones, and at its end."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
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

    What it prints goes to ``publish.log`` in the milestone's folder, by which a later session knows what is published.

    Args:
        hub: where to.
        say: prints one line.
    """

    def __init__(self, hub: HubConfig, say: Callable[[str], None] = print):
        self._hub, self._say = hub, say
        self._waiting: list[Path] = []
        self._running: tuple[Path, subprocess.Popen[bytes]] | None = None
        self._ended: dict[Path, str | None] = {}  # why it failed, None where it did not

    def add(self, milestone: Path) -> None:
        """Publish a milestone as soon as the others are through, if it is asked for and not done already."""
        if self._hub.milestones and _published_at(milestone, self._hub) is None and milestone not in self._waiting:
            self._waiting.append(milestone)
        self._go_on(wait=False)

    def wait(self) -> list[str]:
        """Wait for all of them, say of each where it lies or why it does not; return the names of those that failed."""
        if self._running or self._waiting:
            self._say("waiting for milestones to be published")
        while self._running or self._waiting:
            self._go_on(wait=True)
        for milestone, failure in self._ended.items():
            if failure is None:
                self._say(f"{milestone.name} is {_last_line(milestone)}")
            else:
                command = command_line(milestone_options(self._hub, milestone))
                self._say(f"{milestone.name} is not published: {failure}; try again with `{command}`")
        return [milestone.name for milestone, failure in self._ended.items() if failure is not None]

    def close(self) -> None:
        """Break off what is under way; the run's next session begins it anew."""
        if self._running:
            milestone, process = self._running
            process.send_signal(signal.SIGINT)  # at which it tidies up
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
            process.kill()
            process.wait()
            self._say(f"publishing {milestone.name} was broken off; the same command begins it anew")
        self._running, self._waiting = None, []

    def _go_on(self, wait: bool) -> None:
        """Take note of a process that has ended, and start the next one if none is under way."""
        if self._running:
            milestone, process = self._running
            if wait:
                process.wait()
            if process.poll() is None:
                return
            self._ended[milestone] = _failure(process.returncode, _last_line(milestone))
            self._running = None
        if self._waiting:
            milestone = self._waiting.pop(0)
            self._say(f"publishing {milestone.name} in the background, see {milestone / LOG}")
            try:
                self._running = milestone, _start(milestone_options(self._hub, milestone), milestone / LOG)
            except OSError as error:  # which must not end the training
                self._ended[milestone] = f"it could not be started, {error.strerror}"


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


def _failure(status: int, last_line: str) -> str | None:
    """Why a process failed, None where it did not."""
    if status == 0:
        return None
    _, error, reason = last_line.partition("error: ")
    return reason if error else f"it ended with status {status} after {last_line!r}"


def _published_at(milestone: Path, hub: HubConfig) -> str | None:
    """The address of a milestone in the recipe's repository; None where it is not there, or elsewhere."""
    address = _last_line(milestone).partition("published: ")[2]
    return address if address.endswith(f"/{hub.repo_id}/tree/{milestone.name}") else None


def _last_line(milestone: Path) -> str:
    """The last line of the log that is not empty, without secrets; empty where there is none."""
    try:
        lines = (milestone / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return redact(next((line.strip() for line in reversed(lines) if line.strip()), ""))
