"""What a checkpoint of a distributed run costs, and whether another strategy goes on from it.

    python benchmarks/checkpoints.py                    # widths of a 1B model, 4 layers, FSDP2 on 4 CPU processes
    python benchmarks/checkpoints.py --shape tiny --way zero2

A run makes steps with AdamW on random tokens and saves a checkpoint a few times, while it goes on. Training waits where
the checkpoint is begun, and before the weights change; that is compared with the time until the checkpoint is there,
on the slowest process. Then other processes and strategies load the last checkpoint and compute the loss of the step
that followed it. Bytes are those of all files. Student in float32, no teacher.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from start import SHAPES, WAYS, make_model

from moh_llm.metrics import Batch
from moh_llm.training import networks
from moh_llm.training.checkpoint_writer import CheckpointWriter
from moh_llm.training.checkpoints import load_checkpoint, newest_checkpoint
from moh_llm.training.config import CheckpointConfig, DataConfig, ObjectiveConfig, TrainConfig
from moh_llm.training.optimizer import set_learning_rates
from moh_llm.training.parallel import make_accelerator, seed_step
from moh_llm.training.sharding import distribute
from moh_llm.training.step import TrainingStep, accumulate_gradients

BATCH, LENGTH = 4, 64
READERS = (("fsdp2", 2), ("zero2", 2), ("ddp", 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="few")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, default="fsdp2")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints (default: 3)")
    parser.add_argument("--scratch", type=Path, help="where model and checkpoints go for the time (default: /tmp)")
    parser.add_argument("--probe", choices=["save", "load"], help=argparse.SUPPRESS)  # fresh processes
    args = parser.parse_args()
    if args.probe:
        {"save": save, "load": load}[args.probe](args.scratch, args.rounds)
        return 0
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        _, weights, _ = make_model(args.shape, folder / "model")
        saved = launch("save", args.way, args.processes, folder, args.rounds)
        size = sum(path.stat().st_size for path in newest(folder).glob("*.safetensors"))
        print(f"{args.shape}: {weights / 1e6:.0f}M weights, {args.processes} x {args.way}, {args.rounds} checkpoints")
        print(f"{size / 1e9:.2f} GB written each, {size / weights:.3f} bytes for each trained weight")
        # Of each checkpoint what the slowest process says.
        times = {name: [max(each) for each in zip(*(rank[name] for rank in saved), strict=True)] for name in saved[0]}
        texts = {"begin": "to begin it", "hold": "before the weights change", "write": "until it is there"}
        for name, text in texts.items():
            print(f"{text}: {statistics.median(times[name]):.2f} s ({spread(times[name])})")
        waits = [(a + b) / c for a, b, c in zip(times["begin"], times["hold"], times["write"], strict=True)]
        print(f"training waits {statistics.median(waits):.1%} of the write time ({spread(waits)})")
        alone, beside = (statistics.median(times[name]) for name in ("alone", "beside"))
        print(f"a step takes {beside:.2f} s beside a checkpoint, {alone:.2f} s without: ratio {beside / alone:.2f}")
        wanted = saved[0]["next"][-1]
        for way, processes in ((args.way, args.processes), *READERS):
            found = launch("load", way, processes, folder, 1)
            loss, seconds = found[0]["next"][0], max(rank["load"][0] for rank in found)
            print(f"loaded on {processes} x {way} in {seconds:.1f} s: next loss {loss:.7f}, {loss - wanted:+.1e}")
    return 0


def launch(probe: str, way: str, processes: int, folder: Path, rounds: int) -> list[dict[str, list[float]]]:
    """Run a probe on several processes; what each has found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [__file__, "--probe", probe, "--scratch", str(folder), "--rounds", str(rounds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | WAYS[way]
    subprocess.run(command, check=True, env=environment)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def spread(values: list[float]) -> str:
    """Lowest and highest."""
    return f"{min(values):.3f} to {max(values):.3f}"


def newest(folder: Path) -> Path:
    """The newest checkpoint."""
    found = newest_checkpoint(folder / "checkpoints", print)
    assert found is not None
    return found[0]


class Run:
    """A model that is trained on random tokens.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path):
        data = DataConfig(sequence_length=LENGTH, batch_size=BATCH, micro_batch_size=1)
        objective = ObjectiveConfig(kind="cross_entropy")
        self.config = TrainConfig(
            str(folder / "model"),
            str(folder / "run"),
            1000,
            mixed_precision="no",
            data=data,
            objective=objective,
        )
        self.accelerator = make_accelerator(self.config)
        student = networks.make_student(self.config, self.accelerator.device, self.accelerator.is_fsdp2)
        module = TrainingStep(student, None, objective)
        self.model, self.optimizer = distribute(self.accelerator, module, self.config)
        self.model.train()
        self.weights = networks.trained_weights(self.accelerator.unwrap_model(self.model).student)
        self.state = (self.accelerator, self.model, self.optimizer, self.weights)

    def gradient(self, step: int) -> float:
        """The loss of a step, whose gradient is computed; under DeepSpeed the weights are stepped, too."""
        seed_step(self.config, step, self.accelerator.process_index)
        set_learning_rates(self.optimizer, self.config, step)
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 8192, (BATCH, LENGTH), generator=draw)
        rows = torch.arange(BATCH).chunk(self.accelerator.num_processes)[self.accelerator.process_index]
        positions = torch.arange(LENGTH).expand(len(rows), -1)
        batch: Batch = {"input_ids": ids[rows], "labels": ids[rows], "position_ids": positions}
        losses, _ = accumulate_gradients(self.accelerator, self.model, batch, self.config, 0.01)
        return losses.cross_entropy

    def found(self, folder: Path, **figures: Any) -> None:
        """Write a process's figures."""
        (folder / f"{self.accelerator.process_index}.json").write_text(json.dumps(figures))
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()


def save(folder: Path, rounds: int) -> None:
    """Steps, with a checkpoint now and then."""
    run = Run(folder)
    writer = CheckpointWriter(folder / "checkpoints", *run.state, CheckpointConfig(save_total_limit=1))
    times: dict[str, list[float]] = {name: [] for name in ("begin", "hold", "write", "alone", "beside", "next")}
    step = 0

    def make_step(kind: str) -> tuple[float, float]:
        """The loss of the next step, and how long it waited for the copy."""
        nonlocal step
        step += 1
        began = time.perf_counter()
        loss = run.gradient(step)
        waited = time.perf_counter()
        writer.hold()
        waited = time.perf_counter() - waited
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.accelerator.wait_for_everyone()
        times[kind].append(time.perf_counter() - began)
        return loss, waited

    make_step("alone")
    times["alone"].clear()  # it also makes the moments
    for _ in range(rounds):
        for _ in range(2):
            make_step("alone")
        began = time.perf_counter()
        writer.begin(step, {"updates": step, "seconds": 0.0})
        times["begin"].append(time.perf_counter() - began)
        writer._written.add_done_callback(lambda _, since=began: times["write"].append(time.perf_counter() - since))
        loss, waited = make_step("beside")
        times["hold"].append(waited)
        times["next"].append(loss)
        writer.wait()
    run.found(folder, **times)


def load(folder: Path, rounds: int) -> None:
    """The loss of the step that follows the newest checkpoint."""
    run = Run(folder)
    run.accelerator.wait_for_everyone()
    checkpoint, began = newest(folder), time.perf_counter()
    step = load_checkpoint(checkpoint, *run.state)
    run.accelerator.wait_for_everyone()
    seconds = time.perf_counter() - began
    run.found(folder, load=[seconds], next=[run.gradient(step + 1)])


if __name__ == "__main__":
    sys.exit(main())
