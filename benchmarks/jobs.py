"""Commands that run at once, up to a limit, with a record of each that is written when it ends."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from moh_llm.files import write_json
from moh_llm.reading import read_json

LINES = 60  # kept of what a command prints


class Job(NamedTuple):
    """A command, what is there when it has ended well, and the file of its figures."""

    words: list[str]
    makes: Path | None = None
    figures: Path | None = None


def open_record(path: Path, resume: bool) -> dict[str, Any]:
    """By command how it ended, its seconds, words, the end of what it printed, and figures; seconds by part.

    Raises SystemExit where the folder of `path` holds something, and no record to resume is asked for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(path.parent.iterdir()) and not (resume and path.exists()):
        raise SystemExit(f"error: {path.parent} is not empty; name another, or --resume where it has a {path.name}")
    return read_json(path) if path.exists() else {"seconds": {}, "commands": {}}


def left(jobs: dict[str, Job], record: dict[str, Any]) -> dict[str, Job]:
    """The jobs that have not ended well, by the record and by what they make."""

    def done(name: str, job: Job) -> bool:
        known = record["commands"].get(name, {})
        return known.get("status") == 0 and known["command"] == job.words and (not job.makes or job.makes.exists())

    return {name: job for name, job in jobs.items() if not done(name, job)}


def run_jobs(part: str, jobs: dict[str, Job], path: Path, record: dict[str, Any], until: float, at_once: int) -> None:
    """Run jobs, `at_once` of them, and kill with all their processes those that run when it is `until`.

    Args:
        part: what the seconds are added to.
        jobs: by name, in their order.
        path: of the record; what commands print goes into files beside it.
        record: of earlier jobs, to which these are added.
        until: by `time.monotonic()`.
        at_once: how many run at the same time.
    """
    waiting, running, begin = list(jobs), {}, time.monotonic()
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                running[name] = start(jobs[name], path.parent / "printed" / name.replace("/", "-")), time.monotonic()
            time.sleep(0.1)
            for name in [name for name, (process, _) in running.items() if process.poll() is not None]:
                note(path, record, name, jobs[name], *running.pop(name))
    finally:
        for name, (process, since) in running.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            note(path, record, name, jobs[name], process, since)
        record["seconds"][part] = round(record["seconds"].get(part, 0) + time.monotonic() - begin, 1)
        write_json(path, record)


def start(job: Job, printed: Path) -> subprocess.Popen:
    """Start a command in a group of processes of its own; it prints into `printed.out` and `printed.err`."""
    if job.makes and job.makes.is_dir():  # an unfinished one; checkpoints and finished tasks lie beside it
        shutil.rmtree(job.makes)
    printed.parent.mkdir(exist_ok=True)
    with open(f"{printed}.out", "w") as out, open(f"{printed}.err", "w") as errors:
        return subprocess.Popen(job.words, cwd=printed.parent, stdout=out, stderr=errors, start_new_session=True)


def note(path: Path, record: dict[str, Any], name: str, job: Job, process: subprocess.Popen, since: float) -> None:
    """Record and print how a command ended; of one that failed also its errors."""
    seconds, status, lines = time.monotonic() - since, process.returncode, []
    for kind in ("out", "err") if status else ("out",):
        printed = path.parent / "printed" / f"{name.replace('/', '-')}.{kind}"
        lines += printed.read_text(errors="replace").splitlines()[-LINES:]
    found = {"status": status, "seconds": round(seconds, 1), "command": job.words, "printed": lines}
    if job.figures and job.figures.exists():
        found["figures"] = read_json(job.figures)
    record["commands"][name] = found
    write_json(path, record)
    fault = f", status {status}: {(lines or [''])[-1][-200:]}" if status else ""
    print(f"{name}: {seconds:.0f} s{fault}", flush=True)
