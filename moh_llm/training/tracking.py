"""Curves in TensorBoard, Weights & Biases, trackio and whatever else accelerate can write to.

`log.jsonl` is the record of a run; trackers show the same numbers while it goes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from moh_llm.errors import UserError
from moh_llm.training.config import TrainConfig

PROJECT = "moh-llm"


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise UserError for a tracker that accelerate does not know or whose package is not installed."""
    known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise UserError(f"trackers: {name!r} is unknown; known are {', '.join(known)}")
        if name not in available:
            raise UserError(f"trackers: {name} needs the package {name}: pip install {name}, or take it off the list")


def start_trackers(accelerator: Accelerator, config: TrainConfig, done: int) -> None:
    """Open the recipe's trackers, to go on after ``done`` steps."""
    if not config.trackers:
        return
    name = Path(config.output).resolve().name
    settings: dict[str, dict[str, Any]] = {
        # What was written of steps that are made again is hidden.
        "tensorboard": {"purge_step": done + 1 if done else None},
        "wandb": {"name": name, "id": name, "resume": "allow", "dir": config.output},
        "trackio": {"name": name, "resume": "allow"},
    }
    recipe = {key: value for key, value in _flat(asdict(config)) if isinstance(value, (int, float, str))}
    accelerator.init_trackers(PROJECT, recipe, {name: settings.get(name, {}) for name in config.trackers})


def track(accelerator: Accelerator, line: dict[str, Any]) -> None:
    """Send the numbers of a line of the log to the trackers, per layer where there are layers."""
    if not accelerator.trackers:
        return
    values = {key: value for key, value in line.items() if key not in ("step", "routing")}
    values["routing"] = {key: list_ for key, list_ in (line.get("routing") or {}).items() if key != "load"}
    numbers = {key: value for key, value in _flat(values) if isinstance(value, (int, float))}
    accelerator.log(numbers, step=line["step"])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested maps and lists by names like ``validation/kl`` and ``routing/entropy/07``."""
    for key, value in values.items():
        if isinstance(value, (list, tuple)):
            value = {f"{number:02d}": item for number, item in enumerate(value)}
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value
