"""FLOPs of a forward pass of a MoH model, and the share of the keys that it reads.

Counts two operations per multiply-add of the matrix products and of a fallback's b + a v; norms, rotary
embedding, softmax and gating are left out. Attention counts all positions up to a token's own,
also those of other documents. Of feed-forward experts those are counted that a token selects, and their router.
"""

import torch

from moh_llm.modeling import MoHLlamaConfig, MoHRouter


def forward_flops(config: MoHLlamaConfig, length: int, dense: bool = False) -> int:
    """FLOPs of one forward pass over a sequence of `length` tokens, the sum of `forward_parts`."""
    return sum(forward_parts(config, length, dense).values())


def forward_parts(config: MoHLlamaConfig, length: int, dense: bool = False) -> dict[str, int]:
    """FLOPs of one forward pass over a sequence of `length` tokens by part, as MoH with the least that it needs.

    A head that is off can skip its scores and weighted sums; its query, unless the router takes the norms of queries;
    and its rows of the output projection, unless a fallback is projected in its place. A local fallback needs the
    query, and scores and weighted sums of the keys in its window. Keys and values are always computed: other tokens'
    heads may attend to them.
    """
    hidden, size, layers = config.hidden_size, config.head_dim, config.num_hidden_layers
    total = config.num_attention_heads * layers
    on = total if dense else sum(config.active_heads_per_layer)
    has_fallback, needs_queries = config.head_fallback != "none", config.head_fallback == "local"
    queries = total if needs_queries or config.router_type == "query_norm" else on
    scores = on + (total - on) * fallback_keys(config, length)
    context = (length + 1) / 2  # mean number of positions that a token attends to
    width = config.intermediate_size * (config.num_experts_per_tok if config.num_local_experts else 1)
    with torch.device("meta"):
        routers = [] if dense else [MoHRouter(config, layer) for layer in range(layers)]
    macs = {
        "queries": queries * hidden * size,
        "keys and values": layers * 2 * config.num_key_value_heads * hidden * size,
        "scores and weighted sums": scores * 2 * size * context,
        "output projection": (total if has_fallback else on) * hidden * size,
        "feed-forward": layers * hidden * (3 * width + config.num_local_experts),
        "routing": sum(weight.numel() for router in routers for weight in router.parameters() if weight.dim() == 2),
        # A number linear in the layer's input, and a vector times it.
        "fallbacks": (total - on) * (hidden + size) if has_fallback else 0,
        "vocabulary": hidden * config.vocab_size,
    }
    return {part: round(2 * length * number) for part, number in macs.items()}


def fallback_keys(config: MoHLlamaConfig, length: int) -> float:
    """Keys that a head that is off reads in a sequence, over those of a head that is on.

    At the first tokens of a document, which have all heads on, it reads all keys.
    """
    if config.head_fallback != "local":
        return 0
    return local_keys(length, config.local_window + config.local_sinks, config.all_heads_until)


def local_keys(length: int, seen: int, until: int = 0) -> float:
    """Keys that local attention to `seen` tokens reads in a sequence, over those of causal attention.

    The first `until` tokens read all keys.
    """
    whole = min(max(seen, until), length)
    return (whole * (whole + 1) + 2 * (length - whole) * seen) / (length * (length + 1))


def keys_read(config: MoHLlamaConfig, length: int) -> float:
    """Share of the keys that dense attention reads in a sequence of `length` tokens."""
    on = sum(config.active_heads_per_layer) / (config.num_attention_heads * config.num_hidden_layers)
    return on + (1 - on) * fallback_keys(config, length)


def share_of_keys(config: MoHLlamaConfig, share: float, length: int) -> float:
    """Share of all keys that is read in a document of ``length`` tokens, given the share of the distant ones."""
    near = fallback_keys(config, length)
    return near + (1 - near) * share


def distant_keys(config: MoHLlamaConfig, position_ids: torch.Tensor) -> torch.Tensor:
    """Keys that a head reads of each token if it is on, and not if it is off, float32 `[B, L]`.

    `position_ids` `[B, L]` count within each document. A document's first tokens, which have all heads on, have none.
    """
    if config.head_fallback != "local":
        return position_ids + 1.0
    beyond = position_ids + 1.0 - config.local_window - config.local_sinks
    return beyond.clamp_min(0).masked_fill(position_ids < config.all_heads_until, 0)
