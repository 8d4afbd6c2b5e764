"""Faults at whole commands: kills, and two processes in one folder. What comes out is what a lone, unbroken one makes.

    python benchmarks/faults.py kill --times 10 --scratch out/faults -- python train.py RECIPE --max_steps 200
    python benchmarks/faults.py kill-rank --times 10 --scratch out/faults -- torchrun --nproc_per_node 4 train.py RECIPE
    python benchmarks/faults.py kill-at-end --times 10 --scratch out/faults -- python train.py RECIPE
    python benchmarks/faults.py two-at-once --times 20 --scratch out/faults -- python convert.py BASE

kill: SIGKILL to all processes of a training command at random moments after it has made a step; each time the same
command is given again. kill-rank: likewise, to one process of those that torchrun starts. kill-at-end: SIGKILL to a
training command at so many moments, evenly spaced, of its last stage (saving the model, scoring it, the card), and the
same command again. two-at-once: the command is started twice at the same moment; one of them has to work, the other has
to be refused.

The command lacks --output, which is added. On CPU, threads must be the same in every start for sums to be the same.
Several processes with a strategy of their own are commands like any other:

    ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=2 DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \\
        python benchmarks/faults.py kill --scratch out/faults -- torchrun --nproc_per_node 2 train.py RECIPE
"""

import argparse
import contextlib
import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from moh_llm.files import sha256

# What may differ between two equal runs: times, and where things are. The card is made from the records; what
# trackers write has times throughout.
VARYING = {
    "seconds",
    "timing",
    "peak_memory_mib",
    "written",
    "output",
    "output_dir",
    "created",
    "command",
    "items_per_second",
}
LEFT_OUT = {"README.md", "tensorboard", "report.html", "report.md"}


class Commands:
    """One command with an output folder of choice; what it prints goes to a file.

    Args:
        words: the command, without ``--output``.
        log: where its words go.
    """

    def __init__(self, words: list[str], log: Path):
        self._words, self._log = words, log

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        """Start it."""
        with self._log.open("ab") as log:
            flag = "--output_dir" if {"train", "train.py"} & set(self._words) else "--output"
            return subprocess.Popen([*self._words, flag, str(output)], stdout=log, stderr=log)

    def run(self, output: Path) -> None:
        """Carry it out. Raises CalledProcessError when it fails."""
        if status := self.start(output).wait():
            raise subprocess.CalledProcessError(status, self._words)

    def said(self) -> int:
        """Bytes printed so far, by all of them."""
        return self._log.stat().st_size if self._log.exists() else 0

    def says(self, since: int, text: str) -> bool:
        """Whether ``text`` was printed after so many bytes."""
        return text.encode() in self._log.read_bytes()[since:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=FAULTS, help="see above")
    parser.add_argument("--times", type=int, default=10, help="how often (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of `kill`")
    parser.add_argument("--longest", type=float, default=3.0, help="kill: seconds between a first step and its end")
    parser.add_argument("--scratch", type=Path, required=True, help="folder of the outputs, which must not exist")
    parser.usage = "%(prog)s FAULT [--times N] [--seed N] [--longest S] --scratch DIR -- COMMAND ..."
    divide = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, words = parser.parse_args(sys.argv[1:divide]), sys.argv[divide + 1 :]
    if not words:
        parser.error("name the command after --")
    args.scratch.mkdir(parents=True)
    commands = Commands(words, args.scratch / "output.log")
    commands.run(args.scratch / "whole")
    return FAULTS[args.fault](args, commands, args.scratch / "whole")


def kill(args: argparse.Namespace, commands: Commands, whole: Path, one: bool = False) -> int:
    """Kill one run again and again; with ``one`` a process of it, at whose end the launcher ends the others."""
    broken = args.scratch / "broken"
    draw, killed = random.Random(args.seed), []
    while len(killed) < args.times:
        before = lines(broken)
        process = commands.start(broken)
        while process.poll() is None and lines(broken) <= before:
            time.sleep(0.02)
        time.sleep(draw.random() * args.longest)
        if process.poll() is not None:
            print(f"the run ended by itself after {len(killed)} kills: make it longer, or --longest shorter")
            return 1
        end_one(process, draw) if one else end(process)
        killed.append(lines(broken))
    commands.run(broken)
    print(
        f"{len(killed)} kills, at {', '.join(map(str, killed))} lines of the log, which has {lines(whole)} in the end"
    )
    return compare(whole, broken)


def kill_at_end(args: argparse.Namespace, commands: Commands, whole: Path) -> int:
    """Kill a run between its last step and its end."""
    last = args.scratch / "last"  # a run that has made its steps and nothing more
    shutil.copytree(whole, last)
    shutil.rmtree(last / "model")
    record = json.loads((last / "run.json").read_text())
    (last / "run.json").write_text(json.dumps({**record, "status": "running"}))
    before = (last / "run.json").read_bytes()

    def resume(output: Path) -> subprocess.Popen[bytes]:
        """Start it on a copy and wait until the last stage begins."""
        shutil.copytree(last, output)
        since, process = commands.said(), commands.start(output)
        while process.poll() is None and not commands.says(since, " weights are trained on "):
            time.sleep(0.002)
        return process

    process = resume(args.scratch / "timed")
    began = time.perf_counter()
    process.wait()
    length = time.perf_counter() - began
    print(f"the last stage, with the end of the process, takes {length:.2f} s")
    failed, fates = 0, []
    for number in range(args.times):
        output = args.scratch / f"killed-{number}"
        process = resume(output)
        time.sleep(length * number / args.times)
        ended = process.poll() is not None
        end(process)
        model, now = output / "model", (output / "run.json").read_bytes()
        status = json.loads(now)["status"]
        half = "a half-written model, " if list(output.glob(".model.*")) else ""
        there = "a model" if model.is_dir() else "no model"
        card = ", its card" if (model / "README.md").exists() else ""
        ended_words = ", after its end" if ended else ""
        began_words = "" if now != before else ", just begun"
        fates.append(f"{length * number / args.times:.2f} s: {half}{there}{card}, {status}{began_words}{ended_words}")
        print(fates[-1])
        commands.run(output)
        failed += compare(whole, output, quiet=True)
        failed += not (output / "model" / "README.md").exists()
    print(f"{args.times} kills, {failed} of them not mended by the same command")
    return 1 if failed else 0


def two_at_once(args: argparse.Namespace, commands: Commands, whole: Path) -> int:
    """Start the command twice in one folder."""
    counts = {"one worked, the other was refused": 0, "both worked": 0, "neither worked": 0}
    different = named = 0
    for number in range(args.times):
        output, since = args.scratch / f"pair-{number}", commands.said()
        pair = [commands.start(output) for _ in range(2)]
        statuses = sorted(process.wait() for process in pair)
        names = {(0, 2): 0, (0, 0): 1}
        counts[list(counts)[names.get(tuple(statuses), 2)]] += 1
        named += any(commands.says(since, f"is being written by process {process.pid} on ") for process in pair)
        different += compare(whole, output, quiet=True)
        different += output.with_name(f".{output.name}.lock").exists()
    print(", ".join(f"{text}: {count}" for text, count in counts.items()))
    print(f"{named} refusals named the other process; {different} outputs differ from the lone command's")
    return 0 if counts["one worked, the other was refused"] == args.times and not different else 1


FAULTS = {"kill": kill, "kill-rank": partial(kill, one=True), "kill-at-end": kill_at_end, "two-at-once": two_at_once}


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that it has started; torchrun puts each of its workers into a session of its own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        starter = psutil.Process(process.pid)
        for one in (*starter.children(recursive=True), starter):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def end_one(process: subprocess.Popen[bytes], draw: random.Random) -> None:
    """SIGKILL to one of the processes that torchrun has started, and wait until it has ended the others."""
    ranks = [each for each in psutil.Process(process.pid).children() if "RANK" in each.environ()]
    draw.choice(ranks).kill()
    process.wait()


def lines(folder: Path) -> int:
    """Lines of a run's log."""
    path = folder / "log.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def compare(whole: Path, other: Path, quiet: bool = False) -> int:
    """0 where two outputs are equal, weights bit for bit, else 1 and a line for each file that is not."""
    a, b = (contents(folder) for folder in (whole, other))
    different = [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    for name in different:
        print(f"DIFFERENT: {other / name}")
    if not different and not quiet:
        print(f"all {len(a)} files are the same, {sum(name.endswith('.safetensors') for name in a)} with weights")
    return 1 if different else 0


def contents(folder: Path) -> dict[str, Any]:
    """A folder's files by name: hashes, and records without what may differ."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if LEFT_OUT & set(name.parts):
            continue
        if path.suffix == ".jsonl":
            found[str(name)] = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".json":
            record = without_times(json.loads(path.read_text()))
            if path.name == "checkpoint.json":
                record.pop("files")  # their hashes; the files are here themselves
            found[str(name)] = record
        elif path.suffix == ".safetensors":
            found[str(name)] = tensors_sha256(path)
        else:
            found[str(name)] = sha256(path)
    return found


def tensors_sha256(path: Path) -> str:
    """Hash of a safetensors file with its header's keys sorted: safetensors writes metadata in random order."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:begin]), sort_keys=True)
    return hashlib.sha256(header.encode() + content[begin:]).hexdigest()


def without_times(record: Any) -> Any:
    """A record less what may differ between two equal runs."""
    if isinstance(record, dict):
        return {key: without_times(value) for key, value in record.items() if key not in VARYING}
    return [without_times(value) for value in record] if isinstance(record, list) else record


if __name__ == "__main__":
    sys.exit(main())
