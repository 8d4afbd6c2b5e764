"""The estimate of memory that `moh-llm doctor` prints, against a real step of the large recipes at a small width.

    python benchmarks/memory.py                                # 2, 4 and 8 CPU processes, four strategies
    python benchmarks/memory.py --processes 2 --ways fsdp2

Each recipe of `recipes/` keeps its keys but for the model, the length of sequences and the size of a batch. The first
process is measured. `held` is what it keeps between two steps, weights, teacher and moments: the sizes of all tensors
that Python knows. `step` is the most that a step has on top, gradients, activations and temporary tensors: of two
micro-batches, by PyTorch's profiler, which sees each allocation. Bytes that no width changes or that are there before
the step are left out of both sides: DeepSpeed's bucket of 500 million numbers, and DDP's buckets of gradients. ZeRO-3
divides no weight of less than 100,000 numbers, as nearly all are at this width, so it holds more than estimated.
"""

import argparse
import gc
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from start import WAYS
from torch.profiler import ProfilerActivity, profile

from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.config import TrainConfig
from moh_llm.training.memory import BUCKET, Sizes, estimate_memory
from moh_llm.training.parallel import make_accelerator, seed_step
from moh_llm.training.recipe import load_config
from moh_llm.training.reference import agreed_starting_point
from moh_llm.training.sharding import distribute
from moh_llm.training.step import TrainingStep, accumulate_gradients

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SMALL: dict[str, Any] = {"vocab_size": 4000, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
SMALL |= {"hidden_size": 128, "intermediate_size": 448, "num_shared_heads": 1, "num_active_heads": 4}
LOCAL = {"router_type": "threshold", "head_fallback": "local", "local_window": 32}
PAPER = {"router_type": "query_norm", "head_fallback": "none"}
MODELS = {
    "llama32_1b_recovery": LOCAL | {"intermediate_size": 512, "tie_word_embeddings": True},
    "llama3_8b_lora": LOCAL,
    "moh_llama3_8b_stage2": PAPER,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["ddp", "zero2", "zero3", "fsdp2"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8])
    args = parser.parse_args()
    torch.set_num_threads(1)  # none may be there when processes are forked
    print("estimate / measured, and the measured MiB\n", flush=True)
    print("| recipe | strategy |" + "".join(f" {n}: held | step |" for n in args.processes), flush=True)
    print("|---|---|" + "---|---|" * len(args.processes), flush=True)
    for recipe in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            config = MoHLlamaConfig(**SMALL | MODELS[recipe], max_position_embeddings=2048)
            MoHLlamaForCausalLM(config).save_pretrained(folder)
            for way in args.ways:
                cells = [cell for number in args.processes for cell in measure(recipe, way, number, folder)]
                print(f"| {recipe} | {way} | " + " | ".join(cells) + " |", flush=True)
    return 0


def measure(recipe: str, way: str, processes: int, folder: str) -> list[str]:
    """The two cells of one job, of processes that are forked from this one, which has imported all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
    variables |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "CUDA_VISIBLE_DEVICES": ""}
    fork = multiprocessing.get_context("fork")
    job = [
        fork.Process(target=probe, args=(recipe, way, folder, variables | {"RANK": str(n), "LOCAL_RANK": str(n)}))
        for n in range(processes)
    ]
    for process in job:
        process.start()
    for process in job:
        process.join()
    if any(process.exitcode for process in job):
        sys.exit(f"{recipe}, {way}: a process failed; see above")
    found = json.loads(Path(folder, "measured.json").read_text())
    return [f"{guess / real:.3f}, {real / 2**20:.2f}" for guess, real in found]


def small_recipe(recipe: str, way: str, folder: str, processes: int) -> TrainConfig:
    """A recipe on the small model: two micro-batches a step for each process."""
    path = RECIPES / f"{recipe}.yaml"
    micro = load_config(path, []).data.micro_batch_size
    words = {"model": folder, "output_dir": f"{folder}-run", "data.sequence_length": 128}
    words |= {"data.batch_size": 2 * micro * processes, "report_to": "[]"}
    words["mixed_precision"] = "no" if way == "fsdp2" else "bf16"  # on CPUs Accelerate does not cast for FSDP2
    return load_config(path, [f"--{name}={value}" for name, value in words.items()])


def probe(recipe: str, way: str, folder: str, variables: dict[str, str]) -> None:
    """One process of a job; the first writes estimates and bytes beside the model."""
    os.environ |= variables | ({} if way.startswith("zero") else {"ACCELERATE_USE_CPU": "true"}) | WAYS[way]
    processes = int(variables["WORLD_SIZE"])
    config = small_recipe(recipe, way, folder, processes)
    accelerator = make_accelerator(config)
    starting_point = agreed_starting_point(config, accelerator)
    seed_step(config, 0, 0)
    empty = accelerator.is_fsdp2
    student = networks.make_student(config, accelerator.device, empty)
    model_config = student.config
    teacher = networks.make_teacher(config, starting_point.reference, accelerator.device, empty)
    step = TrainingStep(student, teacher, config.objective, starting_point.reference)
    model, optimizer = distribute(accelerator, step, config)
    del student, teacher, step
    model.train()
    ids = torch.randint(model_config.vocab_size, (2 * config.data.micro_batch_size, config.data.sequence_length))
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1) % (ids.shape[1] // 2)  # two documents in each

    def one_step() -> None:
        batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
        accumulate_gradients(accelerator, model, batch, config, 0.01)
        optimizer.step()
        optimizer.zero_grad()

    one_step()
    one_step()  # in the second one DDP rebuilds its buckets
    gc.collect()
    held = held_bytes() - 2 * ids.nbytes - positions.nbytes - (2 * BUCKET if way == "zero3" else 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        one_step()
    found = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]  # negative when freed
    highest = max(accumulate(size for size in sizes if abs(size) < 2 * BUCKET))
    memory = estimate_memory(config, model_config, Sizes.of(config, model_config), way, processes)
    kept = memory.weights + memory.teacher + memory.moments
    rest = memory.total - kept - (2 * BUCKET if way.startswith("zero") else 0)
    rest -= memory.gradients // 2 if way == "ddp" else 0
    if accelerator.is_main_process:
        Path(folder, "measured.json").write_text(json.dumps([(kept, held), (rest, highest)]))
    accelerator.end_training()


def held_bytes() -> int:
    """Bytes of the storages of all tensors that Python knows."""
    found = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.device.type == "cpu"]
    parts = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in found]
    return sum({part.data_ptr(): part.nbytes() for part in parts}.values())


if __name__ == "__main__":
    sys.exit(main())
