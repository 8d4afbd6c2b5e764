"""A run that is killed again and again ends as an unbroken one does: bit-identical weights, the same log.

    python benchmarks/faults.py --kills 10 --scratch out/faults -- python train.py RECIPE --max_steps 200
    ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=2 DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \\
        python benchmarks/faults.py --kills 10 --scratch out/faults -- torchrun --nproc_per_node 2 train.py RECIPE

The command is carried out once unbroken, then with SIGKILL to all of its processes at random moments after it has made
a step, and given again each time. On CPU, threads must be the same in every start for sums to be the same.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

from moh_llm.files import sha256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="how often to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--longest", type=float, default=3.0, help="seconds between a start's first step and its end")
    parser.add_argument("--scratch", type=Path, required=True, help="folder of the two runs, which must not exist")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the training command, without --output")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    args.scratch.mkdir(parents=True)
    whole, broken = args.scratch / "whole", args.scratch / "broken"
    with (args.scratch / "output.log").open("w") as log:
        subprocess.run([*command, "--output", str(whole)], check=True, stdout=log, stderr=log)
        draw, killed, starts = random.Random(args.seed), [], 0
        while len(killed) < args.kills:
            starts += 1
            before = lines(broken)
            process = subprocess.Popen([*command, "--output", str(broken)], stdout=log, stderr=log)
            while process.poll() is None and lines(broken) <= before:
                time.sleep(0.02)
            time.sleep(draw.random() * args.longest)
            if process.poll() is not None:
                print(f"the run ended by itself after {len(killed)} kills: make it longer, or --longest shorter")
                return 1
            # torchrun puts each of its workers into a session of its own.
            starter = psutil.Process(process.pid)
            for one in (*starter.children(recursive=True), starter):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()
            killed.append(lines(broken))
        subprocess.run([*command, "--output", str(broken)], check=True, stdout=log, stderr=log)
    same_log = read_log(whole) == read_log(broken)
    hashes = [sha256(folder / "model" / "model.safetensors") for folder in (whole, broken)]
    print(
        f"{len(killed)} kills, at {', '.join(map(str, killed))} lines of the log, which has {lines(whole)} in the end"
    )
    print("log:", "the same" if same_log else "DIFFERENT")
    print("weights:", "bit-identical" if len(set(hashes)) == 1 else "DIFFERENT")
    return 0 if same_log and len(set(hashes)) == 1 else 1


def lines(folder: Path) -> int:
    """Lines of a run's log."""
    path = folder / "log.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def read_log(folder: Path) -> list[dict]:
    """A run's log, without what may differ between two equal runs."""
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "timing"} for line in found]


if __name__ == "__main__":
    sys.exit(main())
