"""The head plan: how many heads are shared and active, which are shared, and how tokens choose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig


@dataclass(frozen=True)
class PlanOptions:
    """What the user asked for; None means the preset's or the default choice.

    Attributes:
        preset: "paper" for the paper's layer (first half shared, three quarters active, query-norm
            router); None for ours (linear router calibrated in closed form).
        num_shared_heads, num_active_heads: heads per layer.
        active_ratio: instead of `num_active_heads`, a share of the heads, rounded down.
        router: "query_norm" or "linear".
        shared: "first" or "importance".
    """

    preset: str | None = None
    num_shared_heads: int | None = None
    num_active_heads: int | None = None
    active_ratio: float | None = None
    router: str | None = None
    shared: str = "first"

    @property
    def router_type(self) -> str:
        """The router to build: the one asked for, else the preset's."""
        return self.router or ("query_norm" if self.preset == "paper" else "linear")

    @property
    def needs_calibration(self) -> bool:
        """Whether the plan depends on running the base over text."""
        return self.router_type == "linear" or self.shared == "importance"


def head_counts(options: PlanOptions, num_heads: int) -> tuple[int, int]:
    """Shared and active heads per layer for a model of `num_heads` heads.

    Defaults: the paper's preset shares half of the heads and adds a quarter, each rounded down.
    Otherwise three quarters of the heads are active and 40 % of these are shared, the least share
    that the paper advises.

    Raises:
        UserError: both a number and a ratio of active heads, or a ratio outside (0, 1].
    """
    shared, active = options.num_shared_heads, options.num_active_heads
    if options.active_ratio is not None:
        if active is not None:
            raise UserError("give --num-active-heads or --active-ratio, not both")
        if not 0 < options.active_ratio <= 1:
            raise UserError(f"--active-ratio {options.active_ratio} must be above 0 and at most 1")
        active = max(1, math.floor(options.active_ratio * num_heads + 1e-9))
    if options.preset == "paper":
        shared = num_heads // 2 if shared is None else shared
        return shared, max(1, shared, num_heads // 2 + num_heads // 4) if active is None else active
    active = max(1, shared or 0, num_heads * 3 // 4) if active is None else active
    # At most all heads: were too many asked to be active, that is what the error should name.
    return math.ceil(0.4 * min(active, num_heads)) if shared is None else shared, active


def build_config(
    base_config: dict[str, Any], options: PlanOptions, importance: Sequence[Sequence[float]] | None = None
) -> MoHLlamaConfig:
    """The converted model's config: the base's fields plus the head plan.

    Args:
        base_config: the base's config.json.
        options: what was asked for.
        importance: per layer, one figure per head; the highest are shared when
            `options.shared` is "importance".

    Raises:
        UserError: head counts that no layer can follow.
    """
    num_shared, num_active = head_counts(options, base_config["num_attention_heads"])
    shared_heads = None
    if options.shared == "importance" and importance is not None:
        ranked = [sorted(range(len(layer)), key=lambda head, layer=layer: -layer[head]) for layer in importance]
        shared_heads = [sorted(order[: max(num_shared, 0)]) for order in ranked]
    dropped = ("model_type", "architectures", "auto_map", "transformers_version")
    fields = {key: value for key, value in base_config.items() if key not in dropped}
    try:
        config = MoHLlamaConfig(
            **fields,
            num_shared_heads=num_shared,
            num_active_heads=num_active,
            shared_heads=shared_heads,
            router_type=options.router_type,
            router_score="quantized",
        )
    except ValueError as error:
        raise UserError(f"impossible head plan: {' '.join(str(error).split())}") from error
    config.architectures = ["MoHLlamaForCausalLM"]
    return config


def paper_router(config: MoHLlamaConfig) -> MoHLlamaConfig:
    """The same head counts with the paper's choices: first heads shared, query-norm router."""
    fields = config.to_dict() | {"router_type": "query_norm", "router_score": "quantized", "shared_heads": None}
    return MoHLlamaConfig(**{key: value for key, value in fields.items() if key != "model_type"})
