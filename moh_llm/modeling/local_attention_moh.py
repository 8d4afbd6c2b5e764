"""Local attention: each token sees the first tokens of its document, the last tokens, and a distant token for the rest.

The distant token is a score and a value per head. It stands for the tokens that are out of sight: its score grows with
the logarithm of their number, as their sum in the softmax does. Time and memory are linear in the number of tokens:
queries are taken in blocks, and a block of queries sees the keys of its band and the document's first ones. It runs on
`scaled_dot_product_attention` alone.

Shapes: B batch, T queries, S keys (of the cache and of this pass), H query heads, KV key-value heads, D head size.
"""

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention

from .configuration_moh_llama import MoHLlamaConfig
from .routing_moh import IndexedModule, MoHLinear

_WIDER = 8  # entries that the distant token adds to queries, keys and values: kernels want multiples of 8


def sees_everything(positions: torch.Tensor, starts: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """Whether local attention sees every key that causal attention sees, `[B or 1, T]`; arguments are those below."""
    return out_of_sight(positions, starts, window, sinks) <= 0


def out_of_sight(positions: torch.Tensor, starts: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """How many keys of causal attention local attention leaves out, `[B or 1, T]`; zero or less where none."""
    return positions - starts + 1 - window - sinks


def local_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    window: int,
    sinks: int,
    scaling: float,
    dropout: float = 0.0,
    distant: tuple[torch.Tensor, torch.Tensor] | None = None,
    key_value_heads: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the query at p to the keys j with s <= j <= p and (j > p - window or j < s + sinks).

    With n other keys before p, the softmax has one more entry where n > 0, the distant token's: its score is that given
    plus log n.

    Args:
        queries: `[B, H, T, D]`, after rotary embedding.
        keys, values: `[B, KV, S, D]`, those of a cache included; entries after a query are not read.
        positions: index of each query among the keys, consecutive numbers `[1, T]`.
        starts: index s of the first key of each query's document, `[B or 1, T]`, not decreasing. A start after the
            query's own position, as padding has, counts as the query's position.
        window: how many tokens a query sees up to itself.
        sinks: how many first tokens of its document it sees.
        scaling: factor of the scores.
        dropout: probability.
        distant: scores of the distant token `[B, H, T]` (already scaled) and its values `[H, D]`.
        key_value_heads: the key-value head of each query head, `[H]`; None where H / KV in a row share one.

    Returns:
        Head outputs `[B, T, H, D]`.
    """
    heads, length, size = queries.shape[1:]
    band = Band(positions, starts, window, sinks)
    taken = [band.take(tensor) for tensor in (keys, values)]
    if key_value_heads is not None:
        taken = [tensor.index_select(1, key_value_heads) for tensor in taken]
    visible = band.visible
    if distant is not None:
        scores = distant[0] + out_of_sight(positions, starts, window, sinks).clamp_min(1).log().unsqueeze(1)
        # One more entry of the queries is the score, and one of the values the weight of the distant token.
        queries = torch.cat([queries, (scores / scaling).unsqueeze(-1).to(queries.dtype)], dim=-1)
        queries = pad(queries, (0, _WIDER - 1))
        entry = keys.new_zeros(size + _WIDER)
        entry[size] = 1
        entry = entry.expand(*taken[0].shape[:2], 1, -1)
        taken = [torch.cat([pad(tensor, (0, _WIDER)), entry], dim=2) for tensor in taken]
        visible = torch.cat([visible, band.beyond], dim=-1)
    out = scaled_dot_product_attention(
        band.blocks(queries),
        *taken,
        attn_mask=visible.expand(len(queries), -1, -1, -1).flatten(0, 1).unsqueeze(1),
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=taken[0].shape[1] != heads,
    )
    out = out.unflatten(0, (len(queries), -1)).transpose(2, 3).flatten(1, 2)[:, :length]
    return out if distant is None else out[..., :size] + out[..., size : size + 1] * distant[1].to(out.dtype)


class Band:
    """Which keys each block of queries sees; arguments are those of `local_attention`.

    Attributes:
        visible: whether a query sees a key of its block, `[B or 1, N, block, K]`.
        beyond: whether a query has keys out of sight, `[B or 1, N, block, 1]`.
    """

    def __init__(self, positions: torch.Tensor, starts: torch.Tensor, window: int, sinks: int):
        length = positions.shape[1]
        block = min(length, window)
        self.count, self.missing = -(-length // block), -length % block
        starts = torch.minimum(starts, positions)
        if self.missing:  # the last block repeats the last query
            positions = torch.cat([positions, positions[:, -1:].expand(-1, self.missing)], dim=1)
            starts = torch.cat([starts, starts[:, -1:].expand(-1, self.missing)], dim=1)

        # Keys of a block: the document's first ones where they lie before the band, then the band.
        first = positions.view(1, self.count, block)[:, :, :1]  # [1, N, 1]
        steps = torch.arange(window + block - 1, device=positions.device)
        band = first - window + 1 + steps
        begin = starts.view(-1, self.count, block)[:, :, :1]
        sink = begin + torch.arange(sinks, device=positions.device)
        self.index = torch.cat([sink, band.expand(begin.shape[0], -1, -1)], dim=-1)  # [B or 1, N, K]

        p, s = (tensor.view(-1, self.count, block, 1) for tensor in (positions, starts))
        j = self.index.unsqueeze(-2)
        visible = (j >= s) & (j <= p) & ((j > p - window) | (j < s + sinks))
        # In the band a sink is seen there. A document that begins before the band is that of the block's first query.
        is_sink = torch.arange(self.index.shape[-1], device=positions.device) < sinks
        self.visible = visible & (~is_sink | (j < band[..., :1].unsqueeze(-2)))
        self.beyond = p - s >= window + sinks

    def blocks(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries `[B, H, T, D]` by blocks, `[B * N, H, block, D]`."""
        queries = pad(queries, (0, 0, 0, self.missing)) if self.missing else queries
        return queries.unflatten(2, (self.count, -1)).transpose(1, 2).flatten(0, 1)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keys or values `[B, KV, S, D]` by blocks, `[B * N, KV, K, D]`. What lies outside is any entry."""
        heads, length = tensor.shape[1:3]
        rows, count, width = self.index.shape
        index = self.index.clamp(0, length - 1).flatten(1)
        if rows == 1:
            taken = tensor.index_select(2, index[0])
        else:
            taken = tensor.gather(2, index[:, None, :, None].expand(-1, heads, -1, tensor.shape[-1]))
        return taken.unflatten(2, (count, width)).transpose(1, 2).flatten(0, 1)


class MoHLocalFallback(IndexedModule):
    """What a head that is off contributes: its local attention, with a distant token for what is out of sight.

    The distant token's value is a vector per head, and its score linear in the layer's input. A head that spreads its
    attention over the whole text is nearly that; a head that looks up single tokens is not.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        shared = config.shared_heads_per_layer[layer_idx]
        super().__init__(head for head in range(config.num_attention_heads) if head not in shared)
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.window, self.sinks = config.local_window, config.local_sinks
        self.distant_score = MoHLinear(config.hidden_size, len(self.index))
        self.distant_value = nn.Parameter(torch.zeros(len(self.index), config.head_dim))

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        starts: torch.Tensor,
        scaling: float,
        dropout: float,
    ) -> torch.Tensor:
        """Outputs `[B, T, len(index), D]` of the heads that are not shared, in the order of `index`.

        `queries` are those of all heads, `hidden_states` `[B, T, C]` is the layer's input; see `local_attention`.
        """
        every = len(self.index) == self.num_heads
        return local_attention(
            queries if every else queries.index_select(1, self.index),
            *(keys, values, positions, starts, self.window, self.sinks, scaling, dropout),
            (self.distant_score(hidden_states).transpose(1, 2), self.distant_value),
            None if every else self.index // self.num_key_value_groups,
        )
