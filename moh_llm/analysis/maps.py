"""Attention maps of a layer's heads, and which tokens have each head on: what is lost where a head is off."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from moh_llm.analysis.heads import token_strings
from moh_llm.analysis.watch import LayerPass, attention_patterns, watch
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaPreTrainedModel


@dataclass(frozen=True)
class AttentionMaps:
    """Attention of one layer to one text of T tokens, for its H heads.

    Attributes:
        tokens: the tokens as printable strings, T.
        layer: number of the layer.
        weights: of each query for each key, `[H, T, T]` in float32; a row sums to 1. They are those of all heads, also
            for queries that have the head off.
        on: whether a token has a head on, `[H, T]`.
    """

    tokens: list[str]
    layer: int
    weights: torch.Tensor
    on: torch.Tensor


def attention_maps(
    model: MoHLlamaPreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, layer: int
) -> AttentionMaps:
    """The softmax of queries and keys of one layer (the weights of H_i in Eq. 1), and the heads that tokens have on.

    The layers before it run as the model does, with heads off.

    Args:
        model: a MoH model in evaluation mode.
        tokenizer: its tokenizer; its special tokens are added, and shown.
        text: read in one pass; memory is that of H T^2 weights per layer.
        layer: number of the layer, from 0.

    Raises:
        UserError: there is no such layer, or the text has no tokens.
    """
    if not 0 <= layer < model.config.num_hidden_layers:
        raise UserError(f"layer {layer}: the model has layers 0 to {model.config.num_hidden_layers - 1}")
    ids = torch.tensor([tokenizer(text)["input_ids"]], dtype=torch.int64)
    found: list[torch.Tensor] = []

    def take(seen: LayerPass) -> None:
        if seen.layer == layer:
            found.extend((seen.patterns[0].float().cpu(), seen.on[0].T.cpu()))

    with attention_patterns(model):
        watch(model, [{"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}], take)
    return AttentionMaps(token_strings(tokenizer, ids[0].tolist()), layer, *found)
