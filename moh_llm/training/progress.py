"""What a run shows while it goes: a live line on a terminal, a plain line now and then elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moh_llm.training.log import show_health, show_scores

# Off a terminal (a batch job's log file) this many seconds pass between two lines.
_QUIET_SECONDS = 10.0

# Numbers of the log's line that are shown, with their short names and formats.
_SHOWN = {
    "loss": ("loss", ".4f"),
    "cross_entropy": ("ce", ".4f"),
    "kl": ("kl", ".4f"),
    "layer_distance": ("layers", ".4f"),
    "balance_loss": ("balance", ".3f"),
    "learning_rate": ("lr", ".1e"),
    "active_heads": ("heads", ".2f"),
    "gradient_norm": ("norm", ".2f"),
}


class ProgressLine:
    """Shows steps as they end.

    Args:
        done: steps already made.
        total: steps of the run.
    """

    def __init__(self, done: int, total: int):
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total, completed=done, state="")
        self._first, self._total, self._began, self._shown = done, total, time.monotonic(), float("-inf")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, line: dict[str, Any]) -> None:
        """Show a line of the log (see `moh_llm.training.log`)."""
        step = line["step"]
        if "dropped" in line:
            self.say(f"step {step} was dropped: {line['dropped']}")
        if "validation" in line:
            self.say(f"step {step}: {show_scores(line['validation'])}{show_health(line['routing'])}")
        if "timing" not in line:
            return
        state = self._state(line)
        self._bar.update(self._task, completed=step, state=state)
        now = time.monotonic()
        if self._console.is_terminal or (now - self._shown < _QUIET_SECONDS and step < self._total):
            return
        self._shown = now
        left = (now - self._began) / (step - self._first) * (self._total - step)
        self.say(f"step {step}/{self._total}  {state}  {left:.0f} s left")

    def _state(self, line: dict[str, Any]) -> str:
        parts = [f"{short} {line[name]:{form}}" for name, (short, form) in _SHOWN.items() if line.get(name) is not None]
        parts.append(f"{line['timing']['tokens_per_second']:.0f} tokens/s")
        if "mfu" in line["timing"]:
            parts.append(f"MFU {100 * line['timing']['mfu']:.1f} %")
        return "  ".join(parts)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)
