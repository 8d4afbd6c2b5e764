"""Time and memory of conversion, on random checkpoints of LLaMA's shapes.

    python benchmarks/conversion.py WORKDIR --size 1b 3b 8b                  # copying and converting
    python benchmarks/conversion.py WORKDIR --size 135m --calibrate 24576 --dtype float32    # and calibration

Each job runs in a process of its own, whose peak resident memory is read. "convert" is `--preset
paper --verify none`, which reads no text; its peer is a plain copy of the same files, in turn with
it, and the seconds are those of the work itself, without starting Python. "calibrate" is a
conversion that fits routers, fallbacks and budgets on N tokens in windows of `--context`, with local fallbacks and
`--verify none`; its peer is one forward and backward pass of the loaded model, of the language-modelling
loss by all weights, over as many tokens in the same windows, both in the same compute dtype;
the ratio is that of the two sweeps with their fits ("sweeps") to it. WORKDIR needs
twice the checkpoint's size, and keeps it.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from command import add_compute_dtype, device_and_dtype

from moh_llm.devices import name_device, synchronize

SIZES = {  # vocabulary, hidden, intermediate, layers, heads, KV heads, head size, tied
    "tiny": (512, 256, 512, 4, 8, 2, 32, True),
    "135m": (49152, 576, 1536, 30, 9, 3, 64, True),  # SmolLM2-135M
    "1b": (128256, 2048, 8192, 16, 32, 8, 64, True),  # LLaMA-3.2-1B
    "3b": (128256, 3072, 8192, 28, 24, 8, 128, True),  # LLaMA-3.2-3B
    "8b": (128256, 4096, 14336, 32, 32, 8, 128, False),  # LLaMA-3-8B
}
SHARD_BYTES = 1 << 30
SOURCES = 3  # of the embedded text that is calibrated on; each gives whole windows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=["1b"])
    parser.add_argument("--repeats", type=int, default=3, help="of copying and converting; medians are shown")
    parser.add_argument("--calibrate", type=int, metavar="N", help="calibrate on N tokens, too")
    parser.add_argument("--context", type=int, default=8192, metavar="T", help="tokens of a window of calibration")
    parser.add_argument("--layers", type=int, metavar="N", help="cut the shapes to N layers")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of a new checkpoint")
    add_compute_dtype(parser)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.calibrate and args.calibrate % (SOURCES * args.context):
        parser.error(f"--calibrate {args.calibrate} must be a multiple of {SOURCES} windows of {args.context} tokens")
    if args.layers:
        for size in args.size:
            vocabulary, hidden, intermediate, _, *others = SIZES[size]
            SIZES[size] = (vocabulary, hidden, intermediate, args.layers, *others)
    if args.job:
        done = JOBS[args.job](args)
        print(json.dumps(done | {"mib": _peak_memory_mib()}))
        return 0
    device, _, computed = device_and_dtype(args)
    rows = []
    for size in args.size:
        base = base_folder(args, size)
        if not (base / "config.json").exists():
            _job("make", args, size)
        row = {"size": size, "device": name_device(device), "stored": args.dtype, "computed": computed}
        row["gib"] = round(sum(file.stat().st_size for file in base.iterdir()) / (1 << 30), 2)
        copies, conversions = [], []
        for _ in range(args.repeats):
            copies.append(_job("copy", args, size)["seconds"])
            done = _job("convert", args, size)
            conversions.append(done["seconds"])
        row |= {"copy_s": statistics.median(copies), "convert_s": statistics.median(conversions)}
        row |= {"convert_x": round(row["convert_s"] / row["copy_s"], 3), "convert_mib": done["mib"]}
        if args.calibrate:
            passes, calibrations = [], []
            for _ in range(args.repeats):
                passes.append(_job("passes", args, size))
                calibrations.append(_job("calibrate", args, size))
            ratios = [b["sweeps"] / a["seconds"] for a, b in zip(passes, calibrations, strict=True)]
            row |= {"tokens": args.calibrate, "context": args.context}
            for name, done in ("passes", passes), ("calibrate", calibrations):
                row[f"{name}_s"] = statistics.median(job["seconds"] for job in done)
                row[f"{name}_mib"] = max(job["mib"] for job in done)
            row["sweeps_s"] = statistics.median(job["sweeps"] for job in calibrations)
            row |= {"sweeps_x": round(statistics.median(ratios), 2)}
            row |= {"sweeps_x_least": round(min(ratios), 2), "sweeps_x_most": round(max(ratios), 2)}
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def base_folder(args: argparse.Namespace, size: str) -> Path:
    """Where the checkpoint of a size is, which is made once for each number of layers, dtype and context."""
    layers = f"-{args.layers}-layers" if args.layers else ""
    return args.workdir / f"{size}{layers}-{args.dtype}-{max(8192, args.context)}"


def _job(name: str, args: argparse.Namespace, size: str) -> dict:
    """Run a job of this script in a process of its own, after the disk has come to rest."""
    os.sync()
    command = [sys.executable, __file__, str(args.workdir), "--size", size, "--job", name]
    command += ["--context", str(args.context), "--dtype", args.dtype, "--compute-dtype", args.compute_dtype]
    command += ["--calibrate", str(args.calibrate)] if args.calibrate else []
    command += ["--layers", str(args.layers)] if args.layers else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(args.workdir / f"{size}-out", ignore_errors=True)
    return json.loads(done.stdout.splitlines()[-1])


def _make(args: argparse.Namespace) -> dict:
    """A random checkpoint of that shape, shard by shard, with a byte tokenizer."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim, tied = SIZES[args.size[0]]
    folder, dtype = base_folder(args, args.size[0]), getattr(torch, args.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=max(8192, args.context),
        dtype=args.dtype,
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    groups, held = [{}], 0
    for name, shape in shapes.items():
        if held > SHARD_BYTES:
            groups, held = [*groups, {}], 0
        groups[-1][name], held = shape, held + dtype.itemsize * shape.numel()
    torch.manual_seed(0)
    weight_map = {}
    for number, group in enumerate(groups):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            name: torch.ones(shape, dtype=dtype)
            if "norm" in name
            else torch.empty(shape, dtype=dtype).normal_(std=0.02)
            for name, shape in group.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return {}


def _copy(args: argparse.Namespace) -> dict:
    started = time.perf_counter()
    shutil.copytree(base_folder(args, args.size[0]), args.workdir / f"{args.size[0]}-out")
    return {"seconds": round(time.perf_counter() - started, 2)}


def _convert(args: argparse.Namespace) -> dict:
    return _timed_conversion(args, calibrated=False)


def _calibrate(args: argparse.Namespace) -> dict:
    return _timed_conversion(args, calibrated=True)


def _timed_conversion(args: argparse.Namespace, calibrated: bool) -> dict:
    from moh_llm.conversion import convert as module
    from moh_llm.conversion.calibrate import calibrate
    from moh_llm.conversion.plan import PlanOptions

    options = module.ConversionOptions(
        base=str(base_folder(args, args.size[0])),
        output=args.workdir / f"{args.size[0]}-out",
        plan=PlanOptions(context=args.context, fallback="local") if calibrated else PlanOptions(preset="paper"),
        context=args.context,
        calibration_tokens=args.calibrate if calibrated else 1,
        heldout_tokens=1,
        verify="none",
        compute_dtype=args.compute_dtype,
    )
    sweeps = 0.0

    def timed(*given: Any, **more: Any) -> Any:
        nonlocal sweeps
        began = time.perf_counter()
        found = calibrate(*given, **more)
        sweeps = time.perf_counter() - began
        return found

    module.calibrate = timed
    started = time.perf_counter()
    module.convert(options)
    return {"seconds": round(time.perf_counter() - started, 2), "sweeps": round(sweeps, 2)}


def _passes(args: argparse.Namespace) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    device, dtype, _ = device_and_dtype(args)
    model = AutoModelForCausalLM.from_pretrained(base_folder(args, args.size[0]), dtype=dtype).to(device)
    shape = (args.calibrate // args.context, args.context)
    windows = torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    for batch in windows.split(1):
        batch = batch.to(model.device)
        model(batch, labels=batch, use_cache=False).loss.backward()
    synchronize(device)
    return {"seconds": round(time.perf_counter() - started, 2)}


def _peak_memory_mib() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


JOBS = {"make": _make, "copy": _copy, "convert": _convert, "calibrate": _calibrate, "passes": _passes}


if __name__ == "__main__":
    sys.exit(main())
