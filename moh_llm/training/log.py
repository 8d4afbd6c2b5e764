"""The lines of `log.jsonl`, which the terminal and trackers show, too.

Trackers are TensorBoard, Weights & Biases, trackio, and others that accelerate knows.
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from tqdm import tqdm

from moh_llm.claims import held_out_scores
from moh_llm.errors import UserError
from moh_llm.records.run import LogLine, Timing
from moh_llm.terminal import say
from moh_llm.training.config import TrainConfig
from moh_llm.training.losses import StepLosses


def step_line(
    step: int,
    losses: StepLosses,
    beta: float | None,
    rates: Mapping[str, float],
    gradient_norm: float,
    config: TrainConfig,
    began: float,
    multiplier: float | None = None,
) -> LogLine:
    """One line of the log. All but ``timing`` is the same however often the run was interrupted.

    Numbers that are not finite become None.

    Args:
        beta: weight of the load-balance loss; None: there is none.
        rates: learning rates by their names in the log.
        began: when the step began, by `time.perf_counter`.
        multiplier: weight of the distant keys that are read; None: there is no budget.
    """
    seconds = time.perf_counter() - began
    numbers = {"loss": losses.total(beta or 0.0, multiplier or 0.0)}
    if config.images is not None:
        numbers["task_loss"] = losses.task
    elif config.objective.has_teacher:
        numbers["kl"] = losses.task
    numbers |= {
        **({} if config.images else {"cross_entropy": losses.cross_entropy}),
        **({} if beta is None else {"balance_loss": losses.balance}),
        **({"expert_balance_loss": losses.experts} if losses.experts else {}),
        **rates,
        "gradient_norm": gradient_norm,
    }
    line = LogLine.model_construct(
        step=step,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        **({} if config.images else {"tokens": step * config.tokens_per_step}),
        heads_read=round(losses.heads_read, 6),
    )
    count, unit = config.step_size
    line.timing = Timing(seconds=round(seconds, 4), **{f"{unit}_per_second": round(count / seconds, 1)})
    return line


_PARTS = 5  # of a run; scores, and steps off a terminal, are shown once in each of them
_FORMAT = "{n:,} of {total:,} {unit} |{bar:10}| {remaining} left  {desc}"

# Numbers of the log's line that are shown, with their short names and formats.
_SHOWN = {
    "loss": ("loss", ".4f"),
    "kl": ("kl", ".4f"),
    "cross_entropy": ("ce", ".4f"),
    "task_loss": ("task", ".4g"),
    "balance_loss": ("balance", ".3f"),
    "learning_rate": ("lr", ".1e"),
    "heads_read": ("heads on", ".2f"),
    "keys_read": ("keys", ".3f"),
    "gradient_norm": ("norm", ".2f"),
    "router_learning_rate": ("router lr", ".1e"),
}


class ProgressLine(contextlib.AbstractContextManager):
    """Shows steps as they end: by a bar on a terminal, in a few lines elsewhere.

    ``done`` of ``total`` steps are made already; each reads ``size`` tokens or images, the ``unit``.
    """

    def __init__(self, done: int, total: int, size: int, unit: str):
        self._first, self._total, self._size, self._unit, self._began = done, total, size, unit, time.monotonic()
        self._part = {"scores": -1, "steps": -1}  # of the run in which these were last shown
        # What follows the time that is left is cut at the terminal's edge.
        shape = {"total": total * size, "initial": done * size, "unit": unit, "bar_format": _FORMAT}
        self._bar = tqdm(**shape, dynamic_ncols=True, leave=False, disable=not sys.stderr.isatty())

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, line: LogLine) -> None:
        """Show a line of the log."""
        step = line.step
        if line.dropped is not None:
            self._say(f"step {step} was dropped: {line.dropped}")
        if line.validation is not None and line.routing is not None and self._is_due("scores", step):
            dead = sum(line.routing.dead_heads)
            self._say(f"step {step}: {held_out_scores(line.validation)}{f', {dead} dead heads' if dead else ''}")
        if line.timing is None:
            return
        numbers = line.content()
        rates = {"tokens/s": line.timing.tokens_per_second, "images/s": line.timing.images_per_second}
        parts = [f"{rate:{'.2g' if rate < 10 else '.0f'}} {unit}" for unit, rate in rates.items() if rate is not None]
        parts += [
            f"{short} {numbers[name]:{form}}" for name, (short, form) in _SHOWN.items() if numbers.get(name) is not None
        ]
        state = "  ".join(parts)
        self._bar.set_description_str(state, refresh=False)
        self._bar.update(step * self._size - self._bar.n)
        if self._bar.disable and self._is_due("steps", step):
            left = (time.monotonic() - self._began) / (step - self._first) * (self._total - step)
            self._say(f"step {step}/{self._total}, {step * self._size:,} {self._unit}  {state}  {left:.0f} s left")

    def _is_due(self, what: str, step: int) -> bool:
        before, self._part[what] = self._part[what], step * _PARTS // self._total
        return self._part[what] > before

    def _say(self, text: str) -> None:
        with tqdm.external_write_mode():
            say(text)


PROJECT = "moh-llm"


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise UserError for a tracker whose package is not installed."""
    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in available:
            raise UserError(f"report_to: {name} needs the package {name}: pip install {name}, or take it off the list")


def start_trackers(accelerator: Accelerator, config: TrainConfig, done: int, name: str) -> None:
    """Open the recipe's trackers, to go on after ``done`` steps in the curves of ``name``."""
    if not config.report_to:
        return
    settings: dict[str, dict[str, Any]] = {
        # What was written of steps that are made again is hidden.
        "tensorboard": {"purge_step": done + 1 if done else None},
        "wandb": {"name": name, "id": name, "resume": "allow", "dir": config.output_dir},
        "trackio": {"name": name, "resume": "allow"},
    }
    recipe = {key: value for key, value in _flat(asdict(config)) if isinstance(value, (int, float, str))}
    accelerator.init_trackers(PROJECT, recipe, {name: settings.get(name, {}) for name in config.report_to})


def track(accelerator: Accelerator, line: LogLine) -> None:
    """Send the numbers of a line of the log to the trackers, per layer where there are layers."""
    if not accelerator.trackers:
        return
    numbers = {
        name: value
        for name, value in _flat(line.content())
        if isinstance(value, (int, float)) and name != "step" and not name.startswith("routing/load")
    }
    accelerator.log(numbers, step=line.step)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested maps and lists by names like ``validation/kl`` and ``routing/dead_heads/07``."""
    for key, value in values.items():
        if isinstance(value, (list, tuple)):
            value = {f"{number:02d}": item for number, item in enumerate(value)}
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield prefix + key, value
