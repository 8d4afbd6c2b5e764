"""What the start of a distributed run takes: seconds, and the memory of each process.

    python benchmarks/start.py                        # a model of 1B shape with random weights, FSDP2, 4 CPU processes
    python benchmarks/start.py --shape half --way ddp

The start is what `moh-llm train` does before it reads text: hashes, student, teacher, their distribution. It is
compared with one process that reads the bytes of the weights once from the page cache, with one that loads student
and teacher whole, and with as many processes that only fill as much memory as their parts of both models take, all at
once. They take turns, and times are medians over rounds. Memory is
what a process has of its own (RssAnon), beyond what it had when Python's modules were imported, at its highest; pages
of the weights' files that it maps (RssFile) belong to the machine's page cache, and are given apart. It is sampled
every 5 ms.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import torch

from moh_llm.devices import compute_dtype, name_device
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.config import DataConfig, TrainConfig
from moh_llm.training.parallel import from_main, make_accelerator, seed_step
from moh_llm.training.precision import decide_precision
from moh_llm.training.reference import agreed_starting_point
from moh_llm.training.runs import mark_model
from moh_llm.training.sharding import distribute
from moh_llm.training.step import TrainingStep

SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "half": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32000},
    "few": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 8192},
}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_shared_heads": 4, "num_active_heads": 24}
HEADS |= {"tie_word_embeddings": True, "router_type": "linear", "head_fallback": "value"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP |= {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
WAYS = {"ddp": {}, "fsdp2": FSDP} | {f"zero{n}": ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": n} for n in "123"}
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--way", choices=WAYS, default="fsdp2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mixed-precision", choices=["auto", "no", "bf16"], default="auto", help="as in recipes")
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help="where the model and the output go for the time (default: /tmp)")
    parser.add_argument("--probe", choices=["start", "load", "read", "fill"], help=argparse.SUPPRESS)  # fresh processes
    args = parser.parse_args()
    if args.probe:
        probe(args.probe, recipe(args.scratch, args.mixed_precision), args.bytes)
        return 0
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch)
        file, weights, layer = make_model(args.shape, folder / "model")
        # The processes are on CPUs, whatever else this machine has.
        config = decide_precision(recipe(folder, args.mixed_precision), dtype=compute_dtype(torch.device("cpu")))
        precision, teacher = config.mixed_precision, networks.reference_dtype(config)
        common = [__file__, "--scratch", scratch, "--mixed-precision", precision, "--probe"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(args.processes), *common, "start"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | WAYS[args.way]
        both = (4 + teacher.itemsize) * weights  # the student is in float32
        shard = both // args.processes
        times: dict[str, list[float]] = {"read": [], "load": [], "fill": [], "start": []}
        for _ in range(args.rounds):
            for kind, processes in (("read", 1), ("load", 1), ("fill", args.processes)):
                times[kind].append(apart([*common, kind, "--bytes", str(shard)], processes))
            subprocess.run(command, check=True, env=environment)
            ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(args.processes)]
            times["start"].append(max(rank["seconds"] for rank in ranks))
    read, load, fill, seconds = (statistics.median(taken) for taken in times.values())
    peaks = [rank["peak"] for rank in ranks]
    wanted = both + 4 * 4 * layer  # both models, and four layers
    print(f"{args.shape}: {weights / 1e6:.0f}M weights, a file of {file / MIB:.0f} MiB", end=", ")
    print(f"{args.processes} x {args.way}, mixed precision {precision} on {name_device(torch.device('cpu'))}")
    print(f"start {seconds:.1f} s; one process reads the bytes in {read:.2f} s (ratio {seconds / read:.2f})", end=" ")
    print(f"and loads both models in {load:.1f} s (ratio {seconds / load:.2f});", end=" ")
    print(f"{args.processes} processes fill their parts' memory in {fill:.1f} s (ratio {seconds / fill:.2f})")
    print(
        "on the main process, last round: "
        + ", ".join(f"{name} {taken:.1f} s" for name, taken in ranks[0]["parts"].items())
    )
    print(f"peak of each process, MiB: {', '.join(f'{peak / MIB:.0f}' for peak in peaks)}", end=" ")
    print(f"(a shard of both models is {shard / MIB:.0f}, a layer in float32 {4 * layer / MIB:.0f})")
    print(f"over all: {sum(peaks) / MIB:.0f} MiB = {sum(peaks) / both:.2f} x weights and teacher,", end=" ")
    print(f"{sum(peaks) / wanted:.2f} x (weights and teacher + 4 layers)")
    mapped = [f"{rank['mapped'] / MIB:.0f}" for rank in ranks]
    print(f"pages of files mapped at most, MiB: {', '.join(mapped)}")
    return 0


def make_model(shape: str, folder: Path) -> tuple[int, int, int]:
    """Write a random model, stored in bfloat16 as bases are; bytes of its files, its weights, weights of a layer."""
    config = MoHLlamaConfig(**SHAPES[shape], **HEADS, max_position_embeddings=2048)
    torch.manual_seed(0)
    network = MoHLlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    layer = sum(weight.numel() for weight in network.model.layers[0].parameters())
    return size, sum(weight.numel() for weight in network.parameters()), layer


def recipe(folder: Path, precision: str) -> TrainConfig:
    """The recipe of a start, for the model in that folder."""
    data = DataConfig(sequence_length=32, batch_size=64, micro_batch_size=1)
    model, output = str(folder / "model"), str(folder / "run")
    return TrainConfig(model=model, output_dir=output, max_steps=10, mixed_precision=precision, data=data)


def apart(words: list[str], processes: int) -> float:
    """Seconds that fresh processes of this script take, the slowest of them, the files being in the page cache."""
    command = [sys.executable, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    found = [pipe.communicate()[0] for pipe in pipes]
    if any(pipe.returncode for pipe in pipes):
        sys.exit(f"{shlex.join(words)}: a process failed; see above")
    return max(float(said.split()[-1]) for said in found)


def probe(kind: str, config: TrainConfig, size: int) -> None:
    """A process of the measurement: prints seconds, or writes the figures of a start beside the model."""
    folder = Path(config.model).parent
    if kind != "start":
        began = time.perf_counter()
        if kind == "load":
            dtypes = torch.float32, networks.reference_dtype(config)
            held = [networks.load_network(folder / "model", dtype) for dtype in dtypes]
            del held
        elif kind == "fill":
            torch.empty(size, dtype=torch.uint8).fill_(1)
        else:
            for path in sorted((folder / "model").glob("*.safetensors")):
                with path.open("rb", buffering=0) as file:
                    while file.read(1 << 22):
                        pass
        print(time.perf_counter() - began)
        return
    accelerator = make_accelerator(config)
    accelerator.wait_for_everyone()
    before, highest, ended = resident(), [0, 0], threading.Event()

    def sample() -> None:
        while not ended.wait(0.005):
            highest[:] = map(max, highest, resident())

    sampler = threading.Thread(target=sample)
    sampler.start()
    times = [time.perf_counter()]
    from_main(accelerator, lambda: mark_model(config))
    starting_point = agreed_starting_point(config, accelerator)
    from_main(accelerator, lambda: networks.check_network(Path(config.model)))
    times.append(time.perf_counter())
    seed_step(config, 0, 0)
    student = networks.make_student(config, accelerator.device, accelerator.is_fsdp2)
    reference = starting_point.reference
    teacher = networks.make_teacher(config, reference, accelerator.device, accelerator.is_fsdp2)
    times.append(time.perf_counter())
    held = distribute(accelerator, TrainingStep(student, teacher, config.objective, reference), config)
    accelerator.wait_for_everyone()
    times.append(time.perf_counter())
    ended.set()
    sampler.join()
    del held
    parts = dict(
        zip(("hashes and checks", "networks", "distribution"), (b - a for a, b in pairwise(times)), strict=True)
    )
    found = {"seconds": times[-1] - times[0], "parts": parts}
    found |= {"peak": highest[0] - before[0], "mapped": highest[1] - before[1]}
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


def resident() -> list[int]:
    """Bytes of this process's own memory, and of the files that it maps."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return [(int(sizes["RssAnon"]) + int(sizes["RssShmem"])) << 10, int(sizes["RssFile"]) << 10]


if __name__ == "__main__":
    sys.exit(main())
