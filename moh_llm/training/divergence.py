"""Steps that must not count: a loss or gradient that is not finite, or a loss that jumps."""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

from moh_llm.errors import UserError
from moh_llm.training.config import DivergenceConfig


class DivergenceWatch:
    """Judges each step by those before it.

    All it knows is in the log, so a resumed run judges as an unbroken one would.

    Args:
        config: the recipe's group.
        log: lines of the steps already made.
    """

    def __init__(self, config: DivergenceConfig, log: Iterable[dict[str, Any]]):
        self._config = config
        self._recent: deque[float] = deque(maxlen=config.window)
        self._in_a_row = 0
        for line in log:
            if "loss" in line:
                self._note(line["loss"], line.get("dropped"))

    def judge(self, step: int, loss: float, gradient_norm: float) -> str | None:
        """Why the step is to be dropped, None where it is good.

        Raises:
            UserError: the recipe says to stop, or too many steps in a row were dropped.
        """
        reason = self._fault(loss, gradient_norm)
        self._note(loss, reason)
        if reason is None:
            return None
        if self._config.action == "stop":
            raise UserError(
                f"step {step}: {reason}; lower optimizer.learning_rate or set divergence.action to skip or roll_back, "
                "and pass --overwrite; checkpoints are of the steps before"
            )
        if self._in_a_row >= self._config.most_in_a_row:
            raise UserError(
                f"step {step}: {reason}, and so for {self._in_a_row} steps in a row (divergence.most_in_a_row); "
                "lower optimizer.learning_rate and pass --overwrite"
            )
        return reason

    def _fault(self, loss: float, gradient_norm: float) -> str | None:
        if not math.isfinite(loss):
            return "the loss is not finite"
        if not math.isfinite(gradient_norm):
            return "the gradient is not finite"
        factor = self._config.spike_factor
        if factor is None or len(self._recent) < self._config.window:
            return None
        usual = statistics.median(self._recent)
        if loss > factor * usual:
            return f"the loss jumped to {loss:.4g} from a median of {usual:.4g}"
        return None

    def _note(self, loss: float, dropped: str | None) -> None:
        if dropped is None:
            self._recent.append(loss)
        self._in_a_row = 0 if dropped is None else self._in_a_row + 1
