"""Publishing what a training run makes: checks before it begins, milestones in the background, the model at its end."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import HfApi

import moh_llm
from moh_llm.errors import UserError
from moh_llm.hub import card
from moh_llm.hub.checks import CARD
from moh_llm.hub.config import PublishConfig
from moh_llm.hub.lineage import Lineage, check_name, find_licence, read_lineage
from moh_llm.hub.publish import check_repo_id, find_token, publish
from moh_llm.hub.secrets import redact
from moh_llm.terminal import say
from moh_llm.training.config import HubConfig, TrainConfig
from moh_llm.training.runs import check_converted

LOG = "publish.log"
_SECONDS_TO_END = 5


def check_hub(config: TrainConfig) -> None:
    """Raise UserError for what would prevent publishing the run's model; the Hub is not contacted."""
    if config.hub is None:
        return
    start = Path(config.model)
    check_converted(start)
    try:
        check_repo_id(config.hub.repo_id)
        find_token()
        # The tuned model inherits the conversion's record, not that of an earlier run.
        licence = find_licence(Lineage(start, read_lineage(start).conversion, None))
        check_name(config.hub.repo_id, licence)
    except UserError as error:
        way_out = "leave out hub, and publish the tuned model by moh-llm publish --licence ID"
        message = str(error).replace("pass --licence ID", way_out).replace("--repo-id", "--hub.repo_id")
        raise UserError(message) from error


def write_run_card(config: TrainConfig) -> None:
    """Write the README.md of a finished run's model, unless it has one; a failure is printed and does not raise."""
    model = Path(config.output_dir) / "model"
    if not (model / CARD).exists():
        try:
            card.write_local_card(model)
        except UserError as error:
            say(f"{model / CARD} was not written: {error}")


def publish_run(config: TrainConfig, pushes: "MilestonePushes") -> None:
    """Publish a finished run's model and wait for its milestones. Raises UserError for what is not published."""
    assert config.hub is not None
    write_run_card(config)
    options, failure = _run_options(config.hub, Path(config.output_dir)), None
    try:
        publish(options)
    except UserError as error:
        failure = str(error)
    lost = pushes.wait()
    trained = f"training is finished, its model is {options.folder}"
    milestones = f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} not published, see above" if lost else ""
    if failure is not None:
        raise UserError(
            f"{trained}; publishing it failed: {failure}; try again with `{_command_line(options)}`, or give the same "
            f"command again{f'; {milestones}' if lost else ''}"
        )
    if lost:
        raise UserError(f"{trained} and is published, but {milestones}; give the same command again")


class MilestonePushes:
    """Publishes milestones one after the other in the background, each by a `moh-llm publish` of its own process.

    A process, because the proof loads the model, which changes global settings of torch and transformers that training
    depends on. Its output goes to ``publish.log`` in the milestone's folder, by which a resumed run knows what is
    published.

    Args:
        hub: the repository.
        say: prints one line.
    """

    def __init__(self, hub: HubConfig, say: Callable[[str], None] = say):
        self._hub, self._say = hub, say
        self._api = HfApi()  # whose `run_as_future` runs one job at a time, in order
        self._failures: dict[Path, Future[str | None]] = {}  # None: published
        self._running: tuple[Path, subprocess.Popen[bytes]] | None = None
        self._lock, self._closed = threading.Lock(), False

    def add(self, milestone: Path) -> None:
        """Publish a milestone after those before it, if the recipe asks for it and it is not published."""
        if self._hub.milestones and milestone not in self._failures and not _is_published(milestone, self._hub):
            self._say(f"publishing {milestone.name} in the background, see {milestone / LOG}")
            self._failures[milestone] = self._api.run_as_future(self._publish, milestone)

    def wait(self) -> list[str]:
        """Wait for all of them, report each, and return the names of those that failed."""
        if not all(failure.done() for failure in self._failures.values()):
            self._say("waiting for milestones to be published")
        lost = []
        for milestone, future in self._failures.items():
            if (failure := future.result()) is None:
                self._say(f"{milestone.name} is {_last_line(milestone)}")
            else:
                retry = _command_line(_run_options(self._hub, milestone, milestone.name))
                self._say(f"{milestone.name} is not published: {failure}; try again with `{retry}`")
                lost.append(milestone.name)
        return lost

    def close(self) -> None:
        """Stop the process that is running; a resumed run publishes that milestone again."""
        with self._lock:  # no process is being started
            self._closed = True
        if self._running and self._running[1].poll() is None:
            milestone, process = self._running
            process.send_signal(signal.SIGINT)  # on which it removes its temporary files
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_TO_END)
            process.kill()
            process.wait()
            self._say(f"publishing {milestone.name} was interrupted; the same command publishes it again")

    def _publish(self, milestone: Path) -> str | None:
        """Publish a milestone, in the thread of `run_as_future`; returns why that failed, None if it did not."""
        options = _run_options(self._hub, milestone, milestone.name)
        with self._lock:
            if self._closed:
                return "training ended"
            try:
                process = start_publishing(options, milestone / LOG)
            except OSError as error:
                return f"its process could not be started, {error.strerror}"
            self._running = milestone, process
        status, last = process.wait(), _last_line(milestone)
        return (last.partition("error: ")[2] or f"it ended with status {status} after {last!r}") if status else None


def start_publishing(options: PublishConfig, log: Path) -> "subprocess.Popen[bytes]":
    """Start `moh-llm publish` in a process that imports this package from where this one did."""
    root = str(Path(moh_llm.__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    arguments = shlex.split(_command_line(options))[1:]
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "moh_llm.cli", *arguments],  # -u: errors come last in the log
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _run_options(hub: HubConfig, run: Path, revision: str | None = None) -> PublishConfig:
    """How RUN/model is published; that of RUN/milestones/step-N goes to the branch step-N."""
    return PublishConfig(run / "model", hub.repo_id, revision=revision, run=run)


def _command_line(options: PublishConfig) -> str:
    """The `moh-llm publish` command for the options that training sets, quoted for a shell."""
    words = ["moh-llm", "publish", str(options.folder), "--repo-id", options.repo_id]
    for flag, value in (("--revision", options.revision), ("--run", options.run)):
        words += [] if value is None else [flag, str(value)]
    return shlex.join(words)


def _is_published(milestone: Path, hub: HubConfig) -> bool:
    """Whether the log says that the milestone is in this repository; it may be in another one."""
    address = _last_line(milestone).partition("published: ")[2]
    return address.endswith(f"/{hub.repo_id}/tree/{milestone.name}")


def _last_line(milestone: Path) -> str:
    """The last line of the log that is not empty, without secrets; empty if there is none."""
    try:
        lines = (milestone / LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return redact(next((line.strip() for line in reversed(lines) if line.strip()), ""))
