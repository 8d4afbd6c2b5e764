"""Goldens: conversions, loss curves, greedy tokens and a report of a tiny model, reduced to figures and hashes.

`python -m tests.goldens.freeze` writes them to `frozen.json`, or to the path that is given. Every option is written
out, so that a new default changes no golden. One thread, float32 on the CPU, and instructions that every x86 CPU of the
last ten years has give the same bits on different machines.
"""

import hashlib
import io
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).with_name("frozen.json")

# Libraries read these when they are loaded, hence a process of its own.
PINNED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MKL_CBWR": "COMPATIBLE",
    "MOH_LLM_COMPUTE_DTYPE": "float32",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}
LIBRARIES = ("torch", "transformers", "lm_eval", "numpy")  # whose versions may change bits
WORDS = ["the", "river", "was", "high", "that", "spring", "and", "boats", "lay", "tied", "to", "poplars", "below"]

_CONVERSION = {
    "preset": None,
    "num_shared_heads": None,
    "num_active_heads": None,
    "keys": None,
    "shared": "first",
    "routing_granularity": "head",
    "local_window": 16,
    "local_sinks": 4,
    "local_start": 32,
    "context": 256,
    "calibration_tokens": 2048,
    "heldout_tokens": 1536,
    "tokenizer": None,
    "dtype": "float32",
    "compute_dtype": "float32",
    "overwrite": False,
}
CONVERSIONS: dict[str, dict[str, Any]] = {
    "threshold": {"keys": 0.6, "router": "threshold", "fallback": "local", "budgets": "uneven"},
    "linear": {
        "num_shared_heads": 1,
        "num_active_heads": 5,
        "shared": "importance",
        "router": "linear",
        "fallback": "value",
        "budgets": "uneven",
    },
    "paper": {
        "preset": "paper",
        "num_shared_heads": 4,
        "num_active_heads": 6,
        "router": "query_norm",
        "fallback": "none",
        "budgets": "even",
    },
}
RECIPE: dict[str, Any] = {
    "max_steps": 6,
    "seed": 0,
    "mixed_precision": "no",
    "gradient_checkpointing": False,
    "gate_gradient": "exact",
    "data": {"sequence_length": 128, "batch_size": 4, "micro_batch_size": 2},
    "optimizer": {
        "learning_rate": 1e-3,
        "router_learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    },
    "schedule": {"warmup_steps": 2, "final_learning_rate": 1e-4},
    "objective": {
        "kind": "distillation",
        "balance_coefficient": 0.02,
    },
    "freeze_base": False,
    "lora": None,
    # One batch of the default size, so that the number of sequences in a batch changes no bit.
    "evaluation": {"eval_steps": 3, "max_tokens": 256},
    "checkpoint": {"save_steps": 3, "save_total_limit": 2, "milestone_every": 0},
    "hub": None,
    "report_to": [],
}
TRAINED = ("threshold", "linear")
LOSSES = ("loss", "kl", "cross_entropy", "balance_loss", "gradient_norm")

# What may differ between two runs of the same work.
VARYING = {"seconds", "timing", "version", "versions"}


def measure() -> dict[str, Any]:
    """Make everything in a temporary folder, and reduce it."""
    with tempfile.TemporaryDirectory(prefix="goldens-") as name:
        folder = Path(name).resolve()
        os.environ["MOH_LLM_CACHE"] = str(folder / "cache")
        return _measure(folder)


def _measure(folder: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    make_inputs(folder)
    return {
        "made_with": {
            "cpu": torch.backends.cpu.get_cpu_capability(),
            **{name: metadata.version(name).partition("+")[0] for name in LIBRARIES},
        },
        "conversions": {name: convert(folder, name) for name in CONVERSIONS},
        "training": {name: train(folder, name) for name in TRAINED},
        "tokens": greedy_tokens(folder / "threshold"),
        "report": evaluate(folder),
    }


def make_inputs(folder: Path) -> None:
    """Write a base, a text, a mixture of it, and a suite with its data."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny import save_byte_tokenizer

    config = LlamaConfig(
        vocab_size=save_byte_tokenizer(folder / "base"),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    base = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # multiples of 1/512: the same bits on every machine
        for name, weight in sorted(base.named_parameters()):
            if weight.dim() == 2:
                # Attention of the last layer is felt as much as that of the first, so that both get budgets.
                size = 3 if "layers.1" in name and ("v_proj" in name or "o_proj" in name) else 1
                weight.copy_(torch.randint(-128, 129, weight.shape, generator=generator) * size / 512)
    base.save_pretrained(folder / "base")

    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 90))) for _ in range(120)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _write(
        folder / "mixture.yaml",
        {
            "name": "goldens",
            "validation_share": 0.1,
            "sources": {"river": {"weight": 1, "files": "text.jsonl", "type": "text", "text_field": "text"}},
        },
    )
    make_suite(folder, draw)


def make_suite(folder: Path, draw: random.Random) -> None:
    """A suite of sentences whose last word is chosen, and of sentences that are continued, with one example."""
    # The base gets most of these right, so that the report has shares of what is above chance.
    ends = [1, 1, 0, 0, 1, 2, 2, 2, 0, 2, 1, 0]
    words = ["lay", "\ufffd\ufffd", "W", "high", "the", "\ufffd\ufffd", "N\ufffd"]
    choices = [
        {"sentence": " ".join(draw.choices(WORDS, k=12)), "choices": draw.sample(WORDS, k=3), "answer": answer}
        for answer in ends
    ]
    sentences = [{"sentence": " ".join(draw.choices(WORDS, k=10)), "answer": answer} for answer in words]
    splits = (("ends", "test", choices), ("words", "train", sentences[:1]), ("words", "test", sentences[1:]))
    for name, split, rows in splits:
        place = folder / "data" / "goldens" / name / f"{split}.jsonl"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "dataset_path": "goldens",
        "test_split": "test",
        "doc_to_text": "{{sentence}}",
        "metadata": {"version": 1.0},
    }
    metric = {"aggregation": "mean", "higher_is_better": True}
    _write(
        folder / "ends.yaml",
        task
        | {
            "task": "goldens_ends",
            "dataset_name": "ends",
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"} | metric],
        },
    )
    _write(
        folder / "words.yaml",
        task
        | {
            "task": "goldens_words",
            "dataset_name": "words",
            "output_type": "generate_until",
            "training_split": "train",
            "fewshot_config": {"sampler": "first_n"},
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
            "metric_list": [{"metric": "exact_match"} | metric],
        },
    )
    common = {"dataset": "goldens", "eval_split": "test"}
    ends = {"name": "Ends", "task": "goldens_ends", "definition": "ends.yaml", "config": "ends", "metric": "acc"}
    ends |= {"shots": 0, "fewshot_split": None, "items": 12, "chance": "choices"}
    words = {"name": "Words", "task": "goldens_words", "definition": "words.yaml", "config": "words"}
    words |= {"shots": 1, "fewshot_split": "train", "items": 6, "chance": 0, "metric": "exact_match"}
    benchmarks = [common | ends, common | words]
    _write(folder / "suite.yaml", {"name": "goldens", "title": "Goldens", "data": "data", "benchmarks": benchmarks})


def _write(path: Path, content: dict[str, Any]) -> None:
    import yaml

    path.write_text(yaml.safe_dump(content, sort_keys=False))


def convert(folder: Path, name: str) -> dict[str, Any]:
    """Convert the base: a hash of its own tensors, a hash of each fitted one, the figures of config and record."""
    import moh_llm

    options = _CONVERSION | CONVERSIONS[name]
    moh_llm.convert(folder / "base", folder / name, calibration=folder / "mixture.yaml", **options)
    found, base = read_hashes(folder / name), read_hashes(folder / "base")
    kept = [found[tensor] for tensor in sorted(base)]
    return {
        "base": hashlib.sha256("".join(kept).encode()).hexdigest(),
        "fitted": {tensor: digest for tensor, digest in found.items() if tensor not in base},
        "config": figures(json.loads((folder / name / "config.json").read_text())),
        "record": figures(json.loads((folder / name / "conversion.json").read_text())),
    }


def read_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of name, dtype, shape and bytes of each tensor of a model, by name."""
    import torch
    from safetensors.torch import load_file

    tensors = {
        name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    hashes = {}
    for name, tensor in sorted(tensors.items()):
        digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        hashes[name] = digest.hexdigest()
    return hashes


def train(folder: Path, name: str) -> dict[str, Any]:
    """Train a converted model: each loss over the steps as float.hex has it, the log's other figures, the tensors."""
    import moh_llm

    run = folder / f"{name}-run"
    places = {"model": str(folder / name), "output_dir": str(run), "base": str(folder / "base")}
    recipe = RECIPE | places | {"data": RECIPE["data"] | {"mixture": str(folder / "mixture.yaml")}}
    _write(folder / f"{name}.yaml", recipe)
    moh_llm.train(folder / f"{name}.yaml")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    rest = [{key: value for key, value in line.items() if key not in LOSSES} for line in lines]
    hashes = read_hashes(run / "model")
    return {
        "losses": {key: [line[key].hex() for line in steps] for key in LOSSES if key in steps[0]},
        "log": figures(rest),
        "scores": figures(json.loads((run / "run.json").read_text())["evaluation"]),
        "tensors": hashlib.sha256("".join(hashes.values()).encode()).hexdigest(),
    }


def greedy_tokens(folder: Path) -> list[int]:
    """What a model writes after a prompt that is longer than what has all heads on."""
    import torch
    from transformers import AutoModelForCausalLM

    import moh_llm  # noqa: F401 (transformers learns of its models)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.randint(1, 257, (1, 96), generator=torch.Generator().manual_seed(1))
    found = model.generate(prompt, do_sample=False, max_new_tokens=64, min_new_tokens=64)
    return found[0, 96:].tolist()


def evaluate(folder: Path) -> dict[str, Any]:
    """The figures of a report on the base and the first conversion, whose charts are not rendered."""
    import moh_llm

    def save(self: object, target: io.BytesIO, **_: object) -> None:
        target.write(b'<svg viewBox="0 0 1 1"></svg>')

    with mock.patch("matplotlib.figure.Figure.savefig", save):
        moh_llm.evaluate(
            folder / "threshold",
            base=folder / "base",
            suite=folder / "suite.yaml",
            output_dir=folder / "report",
            data_dir=None,
            limit=None,
            batch_size=4,
            compute_dtype="float32",
            device="cpu",
            log_samples=False,
            analysis=True,
            overwrite=False,
        )
    return figures(json.loads((folder / "report" / "report.json").read_text()))


def figures(content: Any) -> dict[str, dict[str, Any]]:
    """The numbers of a JSON document, and lists of numbers, by the path of their map and by key. Null is no figure."""
    found: dict[str, dict[str, Any]] = {}
    for path, value in _leaves(content, ""):
        parent, _, key = path.rpartition("/")
        found.setdefault(parent.removeprefix("/"), {})[key] = value
    return found


def _leaves(content: Any, path: str) -> Iterator[tuple[str, Any]]:
    listed = content if isinstance(content, list) else [content]
    if listed and all(isinstance(value, bool | int | float) for value in listed):
        yield path, content
        return
    pairs = content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else [])
    for key, value in pairs:
        if key not in VARYING:
            yield from _leaves(value, f"{path}/{key}")


def write_lines(content: dict[str, Any]) -> str:
    """JSON with the maps and lists that hold no map on one line each."""
    text = json.dumps(content, indent=1)
    for pattern in (r"\[[^\[\]{}]*\]", r"{[^{}]*}"):
        text = re.sub(pattern, lambda found: " ".join(found[0].split()), text)
    return text + "\n"


def main(words: list[str]) -> None:
    """Write the goldens, in a new process where the environment is not pinned."""
    if any(os.environ.get(name) != value for name, value in PINNED.items()):
        os.execve(sys.executable, [sys.executable, "-m", "tests.goldens.freeze", *words], os.environ | PINNED)
    found = measure()
    (Path(words[0]) if words else FROZEN).write_text(write_lines(found))


if __name__ == "__main__":
    main(sys.argv[1:])
