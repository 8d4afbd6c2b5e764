"""Which heads tokens use: head load (Fig. 3 and B), and the heads of each token (a table of the rebuttal).

H heads of a layer, in the model's order.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from moh_llm.analysis.watch import LayerPass, last_routed_layer, shared_heads, watch
from moh_llm.errors import UserError
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaPreTrainedModel, MoHRouter


@dataclass(frozen=True)
class HeadLoad:
    """Head load on one text, all lists over layers.

    Attributes:
        tokens: how many were counted.
        load: per layer, the share of tokens that have each head on, `[H]`; 1 for shared heads.
        shared_heads: per layer, ids of the shared heads.
        balance: `load_balance` of each layer's routed heads, or of its groups where these are routed.
    """

    tokens: int
    load: list[list[float]]
    shared_heads: list[list[int]]
    balance: list[float | None]


@torch.no_grad()
def heads_on(
    model: MoHLlamaPreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Which heads each token has on, bool `[B, layers, T, H]`, by one forward pass of the decoder.

    The entries of padding mean nothing. Without a mask, a document begins wherever `position_ids` restart.

    Args:
        model: a MoH model, or its decoder.
        input_ids: `[B, T]`.
        attention_mask: `[B, T]`, 0 where a position is padding.
        position_ids: `[B, T]`.
        kwargs: more arguments of the decoder, such as `past_key_values`.
    """
    found: list[torch.Tensor] = []

    def keep(router: MoHRouter, args: tuple, output: tuple) -> None:
        found.append((output[1] != 0).to(input_ids.device))

    handles = [router.register_forward_hook(keep) for router in model.routers]
    try:
        decoder = getattr(model, model.base_model_prefix, model)
        decoder(input_ids, attention_mask, position_ids, use_cache=False, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(found, dim=1)


def head_load(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch]) -> HeadLoad:
    """Activations / tokens of each head in each layer (Fig. 3), over every position of the batches.

    Raises:
        UserError: there are no tokens.
    """
    routers = model.routers
    counts = [torch.zeros(router.num_heads, dtype=torch.int64) for router in routers]

    def take(seen: LayerPass) -> None:
        counts[seen.layer] += seen.on.sum((0, 1)).cpu()

    tokens = watch(model, batches, take)
    load = [(count.double() / tokens).tolist() for count in counts]
    return HeadLoad(
        tokens=tokens,
        load=load,
        shared_heads=[shared_heads(router) for router in routers],
        balance=[
            load_balance([shares[head] for head in router.routed_heads[:: router.group_size]])
            for router, shares in zip(routers, load, strict=True)
        ],
    )


def load_balance(routed_load: Sequence[float]) -> float | None:
    """Entropy of routed heads' shares of all activations, over its maximum, log R.

    1 where R heads are used alike; log K / log R where all tokens use the same K of them. None where
    nothing can be uneven: below 2 heads, or where no head is ever on.
    """
    total = sum(routed_load)
    if len(routed_load) < 2 or total == 0:
        return None
    entropy = -sum(load / total * math.log(load / total) for load in routed_load if load)
    return entropy / math.log(len(routed_load))


@dataclass(frozen=True)
class TokenHeads:
    """Heads of a text's tokens.

    Attributes:
        tokens: the tokens as printable strings.
        layers: numbers of the layers.
        on: for each of these layers and each token, whether each head is on; heads in the model's order.
    """

    tokens: list[str]
    layers: list[int]
    on: list[list[list[bool]]]


def token_heads(model: MoHLlamaPreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> TokenHeads:
    """The heads that each token of one text has on in the last layer that has routed heads.

    Args:
        model: a MoH model in evaluation mode.
        tokenizer: its tokenizer; its special tokens are added, and shown.
        text: read in one pass.

    Raises:
        UserError: no layer has routed heads, or the text has no tokens.
    """
    last = last_routed_layer(model)
    ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError("the text has no tokens; give more text")
    on = heads_on(model, torch.tensor([ids], device=model.device))[0, last]
    return TokenHeads(token_strings(tokenizer, ids), [last], [on.tolist()])


def token_strings(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Each token as it reads in its text, spaces kept, with line breaks and the like escaped.

    A token that is only a part of a character, or that decodes to nothing, goes by its name in the vocabulary.
    """
    pieces = []
    for number, token in enumerate(ids):
        before = _decode(tokenizer, ids[number - 1 : number])
        piece = _decode(tokenizer, ids[max(0, number - 1) : number + 1])
        # Some tokenizers drop the space that opens a text, so a token is read behind its predecessor.
        piece = piece.removeprefix(before) if piece.startswith(before) else _decode(tokenizer, [token])
        if not piece or "\N{REPLACEMENT CHARACTER}" in piece:
            piece = tokenizer.convert_ids_to_tokens(token)
        pieces.append("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece))
    return pieces


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
