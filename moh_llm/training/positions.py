"""Whether a recipe's sequences fit the positions that a model was trained on."""

import math

from moh_llm.modeling import MoHLlamaConfig
from moh_llm.training.config import TrainConfig
from moh_llm.training.preflight_data import Finding

# Scalings whose max_position_embeddings is that of the scaled model, as transformers and vLLM take them.
_IN_THE_MAXIMUM = ("default", "llama3", "longrope")


def position_limit(model: MoHLlamaConfig) -> int:
    """Positions of a model, with the scaling of its rotary embedding."""
    rope = model.rope_parameters or {}
    kind, factor, limit = rope.get("rope_type", "default"), rope.get("factor") or 1.0, model.max_position_embeddings
    if kind in _IN_THE_MAXIMUM:
        return limit
    return max(limit, math.floor(factor * rope.get("original_max_position_embeddings", limit)))


def check_positions(config: TrainConfig, model: MoHLlamaConfig) -> Finding | None:
    """A warning where sequences are longer than the model's positions; transformers computes them and says nothing."""
    length, limit = config.data.sequence_length, position_limit(model)
    if length <= limit:
        return None
    trained = (model.rope_parameters or {}).get("original_max_position_embeddings", model.max_position_embeddings)
    text = (
        f"data.sequence_length={length} is above the {limit} positions of model={config.model}: documents longer than "
        f"{limit} tokens have positions that it does not know. Lower it, or scale the rotary embedding in its "
        f'config.json: "rope_parameters" with "rope_type": "yarn", "factor": {length / trained:.4g} and '
        f'"original_max_position_embeddings": {trained}, and "max_position_embeddings": {length}'
    )
    return Finding("warning", "positions", text)
