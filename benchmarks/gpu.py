"""What MoH attention costs on one GPU, in a few minutes, as ratios to the fastest dense attention of the same round.

    python benchmarks/gpu.py --json gpu.jsonl                       # at most 8 minutes on an H100 or H200
    python benchmarks/gpu.py --json gpu.jsonl --sections facts layer --minutes 3
    python benchmarks/gpu.py --json small.jsonl --small             # tiny shapes, on a CPU, too: does it run

Sections, each in a process of its own, with so many seconds that are scaled by `--minutes`; what one leaves the next
one has:

- facts: versions, and what the card copies and multiplies per second.
- compile: kernels, in parallel processes, into the caches on disk.
- layer: attention of a layer from its input to its output, with plans, in CUDA graphs. The dense layer's SDPA is pinned
  to cuDNN and to FA2, and the faster one counts. "beyond" leaves out the linear projections on both sides. "operation"
  is interval attention alone beside dense attention alone.
- decode: interval attention of one token per row over a cache, in CUDA graphs.
- kernels: where the time of a layer goes, by PyTorch's profiler.

After each row a line of JSON is written, so that a run that is cut off leaves its rows; `--resume` goes on after them.
What cannot run is a row that says why. Needs torch, triton and transformers, and uses flash-attn-4 where it is there.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # what is compiled stays on disk

import gpu_backends
import gpu_layers
import gpu_operation
from gpu_rows import FULL, LINE, SMALL, Clock, Lost, Record, Sizes, device_of

MINUTES = 8
LOST = 3  # exit status: the device answers no more
GRACE = 8  # seconds for the row that runs when a section's end comes
Section = Callable[[Record, Sizes], None]
SECTIONS: dict[str, tuple[Section | None, int]] = {
    "facts": (gpu_operation.facts, 35),
    "compile": (None, 65),
    "layer": (gpu_layers.layer, 110),
    "decode": (gpu_backends.decode, 35),
    "kernels": (gpu_layers.kernels, 30),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"), help="rows go there (default: gpu.jsonl)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all sections (default: 8)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="not all of them")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--resume", action="store_true", help="go on after the rows that the file has")
    parser.add_argument("--process", help=argparse.SUPPRESS)  # of a section
    parser.add_argument("--unit", type=int, help=argparse.SUPPRESS)  # of what is compiled
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = SMALL if args.small else FULL
    if args.process:
        return measure(args.process, args.json, args.until, sizes, args.unit)
    if args.json.exists() and not args.resume:
        parser.error(f"{args.json} is there; name another file, or go on with --resume")
    print(LINE.format("", "", "ms", "ratio (least to most)", "beyond (least to most)", ""), flush=True)
    end = time.time()
    for name in args.sections:
        end += SECTIONS[name][1] * args.minutes / MINUTES
        print(f"\n{name}: until {max(0, end - time.time()):.0f} s from now", flush=True)
        run_section(name, args, end - GRACE, sizes)
    return 0


def run_section(name: str, args: argparse.Namespace, until: float, sizes: Sizes) -> None:
    """Run a section's process, and another one where the device was lost, until its time is over."""
    command = [sys.executable, __file__, "--process", name, "--until", str(until), "--json", str(args.json)]
    command += ["--small"] if args.small else []
    if name == "compile":
        units = range(len(gpu_backends.compile_units(sizes)))
        processes = [subprocess.Popen([*command, "--unit", str(number)]) for number in units]
        for process in processes:
            wait(process, until)
        return
    status = None
    while status is None or (status not in (0, None) and time.time() < until):
        status = wait(subprocess.Popen(command), until)
        if status:
            print(f"the process of {name} ended with {status}", flush=True)


def wait(process: subprocess.Popen, until: float) -> int:
    """The exit status of a process, which is killed some seconds after the section's end; 0 then."""
    try:
        return process.wait(max(0.1, until + GRACE - time.time()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        print("a process was ended, since the section's seconds are used up", flush=True)
        return 0


def measure(name: str, path: Path, until: float, sizes: Sizes, unit: int | None = None) -> int:
    """Measure a section in this process; the exit status."""
    record = Record(path, name, until, Clock(device_of()[0], sizes))
    try:
        if name == "compile":
            gpu_backends.compile_unit(record, sizes, unit or 0)
        else:
            SECTIONS[name][0](record, sizes)
    except Lost:
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
