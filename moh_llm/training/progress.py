"""What a run shows while it goes: a live line on a terminal, a plain line now and then elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Off a terminal (a batch job's log file) this many seconds pass between two lines.
_QUIET_SECONDS = 10.0


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
            BarColumn(bar_width=20),
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
        """Show a line of the log (see `moh_llm.training.loop`)."""
        step = line["step"]
        state = f"loss {line['loss']:.4f}  {line['timing']['tokens_per_second']:.0f} tokens/s"
        self._bar.update(self._task, completed=step, state=state)
        now = time.monotonic()
        if self._console.is_terminal or (now - self._shown < _QUIET_SECONDS and step < self._total):
            return
        self._shown = now
        left = (now - self._began) / (step - self._first) * (self._total - step)
        self.say(f"step {step}/{self._total}  {state}  {left:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)
