"""FLOPs of a MoH model: of a forward pass in theory, and of a training pass as it is computed today.

Counts two operations per multiply-add of the matrix products; norms, rotary embedding and softmax
are left out. Attention counts the positions up to a token's own, whatever documents they are of.
"""

from moh_llm.modeling import MoHLlamaConfig


def forward_flops(config: MoHLlamaConfig, length: int, dense: bool = False) -> int:
    """FLOPs of one forward pass over a sequence of `length` tokens, as MoH or with all heads and no router.

    As MoH it assumes that heads that are off are skipped wherever they can be, see `forward_parts`.
    """
    return sum(forward_parts(config, length, dense).values())


def forward_parts(config: MoHLlamaConfig, length: int, dense: bool = False) -> dict[str, int]:
    """FLOPs of one forward pass over a sequence of `length` tokens by part.

    As MoH it assumes that heads that are off are skipped wherever they can be: their scores and
    weighted sums, their rows of the output projection, and their queries, unless the router takes
    the queries' norms. Keys and values are always computed: other tokens' heads may attend to them.
    """
    hidden, size, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    layers, total = config.num_hidden_layers, heads * config.num_hidden_layers
    on = total if dense else sum(config.active_heads_per_layer)
    asked = total if config.router_type == "query_norm" else on
    routed = [heads - len(shared) for shared in config.shared_heads_per_layer]
    macs = {
        "queries": asked * hidden * size,
        "keys and values": layers * 2 * config.num_key_value_heads * hidden * size,
        "scores and weighted sums": _score_macs(config, on, length),
        "output projection": on * hidden * size,
        "feed-forward": layers * 3 * hidden * config.intermediate_size,
        "routing": 0 if dense else sum(_routing_macs(config, number) for number in routed),
        "vocabulary": hidden * config.vocab_size,
    }
    return {part: round(2 * length * number) for part, number in macs.items()}


def training_flops(config: MoHLlamaConfig, length: int, teacher: bool, recompute: bool, frozen: bool) -> int:
    """FLOPs of a training pass, forward and backward, over one sequence of `length` tokens.

    That of the kernel there is, which computes all heads and then replaces those that are off: the
    dense network and the routing. A forward pass costs 1; the backward pass 2, a product for the
    gradient of each input and one for that of each weight; where the base's weights are frozen
    (LoRA), their products of the second kind fall away, which leaves about 1 (the scores, which have
    no weights, still cost 2, and so does the routing, which is trained). Adapters are left out.

    Args:
        config: the model's.
        length: tokens.
        teacher: the base gives its distribution, too: one more forward pass.
        recompute: activations are recomputed (gradient checkpointing): one more forward pass of the
            decoder layers.
        frozen: the base's weights are not trained.
    """
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head = config.hidden_size * config.vocab_size
    projections = layers * _projection_macs(config, heads)
    scores = layers * _score_macs(config, heads, length)
    routing = sum(_routing_macs(config, heads - len(shared)) for shared in config.shared_heads_per_layer)
    inside = projections + scores + routing
    backward = (1 if frozen else 2) * (projections + head) + 2 * (scores + routing)
    total = inside + head + backward + teacher * (inside + head) + recompute * inside
    return round(2 * length * total)


def _projection_macs(config: MoHLlamaConfig, heads: int) -> int:
    """Multiply-adds per token of a layer's weights, without routing, with so many query heads."""
    hidden, size = config.hidden_size, config.head_dim
    attention = 2 * heads * hidden * size + 2 * config.num_key_value_heads * hidden * size
    return attention + 3 * hidden * config.intermediate_size


def _score_macs(config: MoHLlamaConfig, heads: int, length: int) -> float:
    """Multiply-adds per token of a layer's attention scores and weighted sums."""
    context = (length + 1) / 2  # mean number of positions that a token attends to
    return 2 * heads * config.head_dim * context


def _routing_macs(config: MoHLlamaConfig, routed: int) -> int:
    """Multiply-adds per token of a layer's router and stand-ins."""
    unit = config.heads_per_unit
    router = {"query_norm": 0, "linear": config.hidden_size * routed // unit}.get(
        config.router_type, config.hidden_size * (config.num_attention_heads // unit + 2)
    )
    stand_in = (config.hidden_size + config.head_dim) * routed if config.head_stand_in != "none" else 0
    return router + stand_in
