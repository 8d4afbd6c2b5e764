"""What the commands of this folder share: how they end, dtype, models, time, how they resume, and an interval.

They end with 0, or with 1 and a line that says what is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel

from moh_llm.devices import choose_device, compute_dtype, name_device
from moh_llm.errors import UserError
from moh_llm.evaluation.models import check_model
from moh_llm.files import write_json
from moh_llm.intervals import Interval
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.reading import read_json

RESAMPLES = 2000  # of bootstraps


def status_of(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """The exit status of `run(args)`; its `UserError` is printed."""
    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def add_compute_dtype(
    parser: argparse.ArgumentParser, default: str = "auto", why: str = "bfloat16 where this device computes it fast"
) -> None:
    """Declare `--compute-dtype`, which `device_and_dtype` reads; its help says why the default is what it is."""
    names = ["auto", "bfloat16", "float32"]
    words = f"of models and what they compute (default: {default}, {why})"
    parser.add_argument("--compute-dtype", choices=names, default=default, help=words)


def device_and_dtype(args: argparse.Namespace) -> tuple[torch.device, torch.dtype, str]:
    """The device, what `--compute-dtype` stands for on it, and that dtype's name."""
    device = choose_device()
    dtype = compute_dtype(device, args.compute_dtype)
    return device, dtype, str(dtype).removeprefix("torch.")


def kind_of_device(device: torch.device) -> str:
    """The device by name, for figures that go on on the same one; all CPUs are one kind, whatever their threads."""
    return "CPU" if device.type == "cpu" else name_device(device)


def now() -> float:
    """Seconds, after what was launched on an accelerator has ended."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def cache_bytes(cache: Cache) -> int:
    """Memory of a cache, room for further tokens included."""
    rooms = [room for layer in cache.layers for room in getattr(layer, "_rooms", [])]  # those of a MoHCache
    values = [value for owner in (*cache.layers, *rooms) for value in vars(owner).values()]
    tensors = [one for value in values for one in (value if isinstance(value, list) else [value])]
    storages = [one.untyped_storage() for one in tensors if isinstance(one, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def load_dense(name: str | Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A dense model for inference."""
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()


def load_models(
    base: str, names: Sequence[str], device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, MoHLlamaForCausalLM]]:
    """A base and converted models, by their names, for inference. Raises UserError where one is not there."""
    for name in (base, *names):
        check_model(name)
    models = {name: MoHLlamaForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval() for name in names}
    return load_dense(base, device, dtype), models


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write what a folder's results depend on into its `settings.json`. Raises UserError where it has others."""
    path = folder / "settings.json"
    if not path.exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty, and nothing says what its results are of; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    elif differ := [name for name, value in settings.items() if read_json(path).get(name) != value]:
        raise UserError(f"{folder} holds results of another {', '.join(differ)} ({path}); name another folder")


def difference_interval(tokens: np.ndarray, nats: np.ndarray, reference: np.ndarray) -> Interval | None:
    """95 % interval of the mean over seeds of loss - reference's, by bootstrap over documents and seeds.

    `tokens` of each document, `[D]`; nats of each seed and document, `[S, D]`, seeds being paired. None with fewer than
    two documents.
    """
    if len(tokens) < 2:
        return None
    generator, seeds = np.random.default_rng(0), len(nats)
    drawn = generator.multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), RESAMPLES).astype(np.float64)
    differences = drawn @ (nats - reference).T / (drawn @ tokens)[:, None]
    weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    return np.percentile((differences * weights).sum(1), (2.5, 97.5)).tolist()
