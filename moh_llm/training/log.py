"""The lines of `log.jsonl`, and how scores read in words."""

import math
import time
from typing import Any

from moh_llm.records.lineage import REFERENCES
from moh_llm.training.config import TrainConfig
from moh_llm.training.objectives import StepLosses


def step_line(
    step: int,
    losses: StepLosses,
    beta: float,
    rates: tuple[float, float],
    gradient_norm: float,
    config: TrainConfig,
    heads: list[int],
    began: float,
    peak_rate: float | None,
) -> dict[str, Any]:
    """One line of the log. All but ``timing`` is the same however often the run was interrupted.

    Numbers that are not finite are None. ``peak_rate`` is the tokens/s that the devices would reach
    at their peak, if it is known; the share of it that was reached is the model FLOPs utilisation.
    """
    seconds = time.perf_counter() - began
    extra = {"kl": losses.task} if config.objective.kind == "distillation" else {}
    if config.objective.layer_coefficient:
        extra["layer_distance"] = losses.layers
    line = {
        "step": step,
        "loss": losses.total(beta, config.objective.layer_coefficient),
        **extra,
        "cross_entropy": losses.cross_entropy,
        "balance_loss": losses.balance,
        "learning_rate": rates[0],
        "router_learning_rate": rates[1],
        "gradient_norm": gradient_norm,
        "tokens": step * config.tokens_per_step,
        "active_heads": sum(heads) / len(heads),
    }
    finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
    rate = config.tokens_per_step / seconds
    timing = {"seconds": round(seconds, 4), "tokens_per_second": round(rate, 1)}
    if peak_rate is not None:
        timing["mfu"] = round(rate / peak_rate, 4)
    return finite | {"timing": timing}


def show_scores(scores: dict[str, Any]) -> str:
    """Scores on held-out text as part of a sentence."""
    text = f"perplexity {scores['perplexity']:.3f} on {scores['tokens']} held-out tokens"
    if "kl" in scores:
        text += (
            f"; {REFERENCES[scores['reference']]}: {scores['reference_perplexity']:.3f}, KL to it {scores['kl']:.4f}"
        )
    if "all_heads" in scores:
        text += f", with all heads on {scores['all_heads']['kl']:.4f}"
    if scores.get("floor") is not None:
        text += f", floor {scores['floor']:.2g}"
    return text


def show_health(routing: dict[str, Any]) -> str:
    """Router health (`moh_llm.training.health`) likewise, to follow scores."""
    text = ""
    if dead := sum(routing["dead_heads"]):
        text += f", {dead} dead heads"
    if routing["changed"]:
        text += f", {100 * sum(routing['changed']) / len(routing['changed']):.1f} % of routings changed"
    return text
