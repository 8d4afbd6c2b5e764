"""The base with a cache that kvpress compresses: SnapKV, Expected Attention, StreamingLLM and others.

    pip install kvpress==0.5.5   # in an environment of its own: it takes transformers below 5.3

A press chooses which keys of a prompt stay, once, at its end. It keeps all keys that come later.
"""

from typing import Any

import torch
from command import cache_bytes
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.errors import UserError


def press_of(name: str) -> Any:
    """A class of kvpress. Raises UserError if that does not import, or has none of this name."""
    own = {key: attend for key, attend in ALL_ATTENTION_FUNCTIONS.items() if key.startswith("moh_")}
    try:
        import kvpress  # wraps all registered functions, by arguments that those of MoH models do not have
    except ImportError as error:
        raise UserError(
            f"kvpress does not import ({error}); pip install kvpress==0.5.5 in an environment of its own"
        ) from error
    ALL_ATTENTION_FUNCTIONS.update(own)
    if not isinstance(found := getattr(kvpress, name, None), type):
        raise UserError(f"--presses {name}: kvpress has no such class")
    return found


def read_pressed(
    model: PreTrainedModel, ids: torch.Tensor, prompt: int, size: int, press: Any
) -> tuple[torch.Tensor, list[int], int]:
    """Read `ids` `[1, T]` with a press, which keeps at most `size` bytes of the cache of the first `prompt` tokens.

    Returns:
        The last hidden states `[T - prompt, C]` of the others, read in one pass with the compressed cache; the bytes of
        the cache after the prompt and after all tokens; and the number of dropped tokens.
    """
    cache, positions = DynamicCache(config=model.config), torch.arange(ids.shape[1], device=ids.device)[None]
    numbers = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim  # a token's
    with press(compression_ratio=1 - size / (prompt * numbers * model.dtype.itemsize))(model):
        model.model(ids[:, :prompt], past_key_values=cache)
    dropped, sizes = prompt - cache.get_seq_length(), [cache_bytes(cache)]
    # The cache holds fewer tokens than were read, so that positions are to be given.
    later = model.model(ids[:, prompt:], past_key_values=cache, position_ids=positions[:, prompt:])
    return later.last_hidden_state[0], [*sizes, cache_bytes(cache)], dropped
