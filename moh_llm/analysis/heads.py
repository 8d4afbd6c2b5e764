"""What the heads of a model do: a pass watched layer by layer, and the record of named texts, such as benchmarks.

    record = analyse(model, tokenizer, {"SciQ": ["Who wrote ...", ...], "PIQA": [...]})

Models are measured as they are set: within `model.all_heads_active()` every head is on. Shapes: B batch, T tokens,
H query heads, D head size. Heads are in the model's order.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import MethodType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from moh_llm.data.shards import TokenStream
from moh_llm.data.windows import fixed_batches, stack, window
from moh_llm.devices import synchronize
from moh_llm.errors import UserError
from moh_llm.flops import forward_flops
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaForCausalLM, MoHLlamaPreTrainedModel, MoHRouter

LENGTHS = tuple(2**n for n in range(7, 18))  # tokens: 128 to 131,072
_ROW = 512  # tokens
_ROWS = 4  # of a batch
_LONGEST_TIMED = 8192  # tokens
_SLOW = 5.0  # seconds of all forward passes of a length, after which no longer one is timed
_REPEATS = 3


@dataclass(frozen=True)
class LayerPass:
    """States of one attention layer for one batch."""

    layer: int
    on: torch.Tensor
    """Which heads each token has on, bool `[B, T, H]`."""
    heads: torch.Tensor
    """Input of the output projection `[B, T, H, D]`: g_i H_i of Eq. 4; of a head that is off its fallback, or zeros."""


@torch.no_grad()
def watch(model: MoHLlamaPreTrainedModel, batches: Iterable[Batch], take: Callable[[LayerPass], None]) -> int:
    """Run the decoder over batches and pass each layer's states to ``take``; returns the number of tokens.

    The model is in evaluation mode. Batches have `input_ids` and `position_ids` `[B, T]`, and documents are isolated
    where positions restart; those of images have `pixel_values`. ``take`` gets a batch's layers in order.

    Raises:
        UserError: there are no tokens.
    """
    decoder = getattr(model, model.base_model_prefix, model)
    device = next(decoder.parameters()).device
    tokens, on = 0, torch.empty(0)  # of the layer whose heads come next

    def keep(router: MoHRouter, args: tuple, output: tuple) -> None:
        nonlocal on
        logits, gate = output
        # A weighted score may round to zero, so the selection counts as well.
        selected = router._of_heads(logits.new_ones(*logits.shape[:-1], router.shared_groups), router.select(logits))
        on = (gate != 0) | selected.bool()

    def pass_on(layer: int, head_dim: int, o_proj: nn.Module, args: tuple) -> None:
        nonlocal tokens
        tokens += on[..., 0].numel() * (layer == 0)
        take(LayerPass(layer, on, args[0].unflatten(-1, (-1, head_dim))))

    # Not by class: PEFT wraps routers, and code from the Hub has a class of its own.
    layers = [layer for layer in decoder.modules() if hasattr(getattr(layer, "router", None), "routed_groups")]
    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.router.register_forward_hook(keep))
            hooks.enter_context(layer.o_proj.register_forward_pre_hook(partial(pass_on, number, layer.head_dim)))
        for batch in batches:
            if "pixel_values" in batch:
                decoder(pixel_values=batch["pixel_values"].to(device))
            elif batch["input_ids"].numel():
                ids, positions = batch["input_ids"].to(device), batch["position_ids"].to(device)
                decoder(input_ids=ids, position_ids=positions, use_cache=False)
    if not tokens:
        raise UserError("the text to analyse has no tokens; give more text")
    return tokens


def last_routed_layer(model: MoHLlamaPreTrainedModel) -> int:
    """Number of the last layer in which tokens choose among heads. Raises UserError if there is none."""
    layers = [number for number, router in enumerate(model.routers) if router.num_routed]
    if not layers:
        raise UserError("the model has no routed heads: every head of every layer is shared")
    return layers[-1]


def heads_on(model: MoHLlamaPreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Which heads each token of `input_ids` `[B, T]` has on, bool `[B, layers, T, H]`, by one pass of the decoder."""
    found: list[torch.Tensor] = []
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    batch = {"input_ids": input_ids, "position_ids": positions}
    watch(model, [batch], lambda seen: found.append(seen.on.to(input_ids.device)))
    return torch.stack(found, dim=1)


# ---- the record


def analyse(
    model: MoHLlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Sequence[str]],
    tokens_per_text: int = 1024,
    lengths: Sequence[int] = LENGTHS,
) -> dict[str, Any]:
    """Measure a model's heads on some texts, and its cost by length.

    The first `tokens_per_text` tokens of each text are read, in rows of 512 tokens or of the model's context, with each
    document isolated; a document that is longer than a row loses its beginning.

    Args:
        model: a MoH model in evaluation mode, where it lies, as it is set.
        tokenizer: adds its special tokens to each document.
        texts: documents by the name of their text.
        lengths: in tokens, for the cost. FLOPs leave out those beyond the model's context; measured seconds also those
            beyond 8,192 and those after the first whose passes take more than 5 s together.

    Raises:
        UserError: a model that is not MoH or has no routed heads, a text without tokens, or a model that does not
            compute finite numbers.
    """
    if not isinstance(model, MoHLlamaForCausalLM):
        raise UserError(f"a {type(model).__name__} has no heads to choose among: only MoH models are analysed")
    last_routed_layer(model)  # raises if there is none
    context = model.config.max_position_embeddings
    row = min(_ROW, context)

    streams = {name: _read(tokenizer, documents, row, tokens_per_text) for name, documents in texts.items()}
    if not streams or not all(map(len, streams.values())):
        raise UserError("a text to analyse has no tokens; give more text")
    lengths = [length for length in lengths if length <= context]
    return {
        "heads": model.config.num_attention_heads,
        "num_active": [router.num_active for router in model.routers],
        # The tokens of a document that have all heads on count in the loads below.
        "all_heads_until": model.config.all_heads_until,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        **measure_load(model, {name: _batches(stream, row) for name, stream in streams.items()}),
        "flops": [
            {
                "length": length,
                "moh": forward_flops(model.config, length),
                "dense": forward_flops(model.config, length, dense=True),
            }
            for length in lengths
        ],
        "seconds": seconds_by_length(model, [length for length in lengths if length <= _LONGEST_TIMED]),
    }


def _read(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], row: int, tokens: int) -> TokenStream:
    """The first `tokens` tokens of some documents, of each of them at most its last `row`."""
    pieces: list[np.ndarray] = []
    for document in documents:
        if sum(map(len, pieces)) >= tokens:
            break
        ids = tokenizer(document, verbose=False)["input_ids"]  # verbose, it warns of every long document
        # The end holds the question, and the beginning of the next row would lack its context.
        pieces.append(np.array(ids[-row:], dtype=np.int64))
    stream = TokenStream.from_documents(pieces)
    return stream.part(0, min(tokens, len(stream)))


def _batches(stream: TokenStream, row: int) -> list[Batch]:
    """A whole stream as rows of `row` tokens, and what is left over as one shorter row."""
    batches = fixed_batches([stream], [1.0], row, len(stream), _ROWS)
    rest = len(stream) % row
    return [*batches, stack([window(stream, len(stream) - rest, rest)], rest)] if rest else batches


def measure_load(model: MoHLlamaPreTrainedModel, texts: Mapping[str, Iterable[Batch]]) -> dict[str, Any]:
    """Head load on some texts, in one pass over each.

    Returns:
        - `head_load` (Fig. 3): per layer the share of tokens that have each head on, and the shared heads.
        - `head_load_by_text` (Fig. B): the same of the last layer with routed heads, by text.

    Raises:
        UserError: no layer has routed heads, a text has no tokens, or the heads do not give finite numbers.
    """
    last, routers = last_routed_layer(model), model.routers
    tokens: dict[str, int] = {}
    counts = {name: torch.zeros(len(routers), routers[0].num_heads, dtype=torch.int64) for name in texts}
    for name, batches in texts.items():

        def take(seen: LayerPass, count: torch.Tensor = counts[name]) -> None:
            if not seen.heads.isfinite().all():
                raise UserError("the model's heads do not give finite numbers; dtype float32 may help")
            count[seen.layer] += seen.on.sum((0, 1)).cpu()

        tokens[name] = watch(model, batches, take)
    shared = [list(router.kinds()[0]) for router in routers]
    total = sum(tokens.values())
    return {
        "head_load": {"tokens": total, "load": _shares(sum(counts.values()), total), "shared_heads": shared},
        "head_load_by_text": {
            "layer": last,
            "shared_heads": shared[last],
            "tokens": tokens,
            "load": {name: _shares(count[last], tokens[name]) for name, count in counts.items()},
        },
    }


def _shares(counts: torch.Tensor, tokens: int) -> Any:
    return (counts.double() / tokens).tolist()


@torch.no_grad()
def seconds_by_length(model: MoHLlamaForCausalLM, lengths: Sequence[int]) -> list[dict[str, float]]:
    """Seconds of a forward pass over random tokens of each length, without a cache, as MoH and as the dense base.

    The dense base is the same model within `dense_attention`. Model and base take turns, so that a machine that slows
    down slows both; figures are medians, without the first turn.
    """
    draw = torch.Generator().manual_seed(0)
    costs = []
    for length in lengths:
        ids = torch.randint(model.config.vocab_size, (1, length), generator=draw).to(model.device)
        moh, dense = [], []
        for _ in range(1 + _REPEATS):
            moh.append(_time_pass(model, ids))
            with dense_attention(model):
                dense.append(_time_pass(model, ids))
        costs.append({"length": length, "moh": median(moh[1:]), "dense": median(dense[1:])})
        if sum(moh + dense) > _SLOW:
            break
    return costs


@contextlib.contextmanager
def dense_attention(model: MoHLlamaPreTrainedModel) -> Iterator[None]:
    """Within the block every layer runs the base's attention as transformers has it: no router, gate or fallback."""
    with contextlib.ExitStack() as replaced:
        for attention in (module for module in model.modules() if isinstance(module, LlamaAttention)):
            if attention.config.query_key_norm:
                attention.sliding_window = None  # Qwen3's code reads it
            dense = Qwen3Attention if attention.config.query_key_norm else LlamaAttention
            replaced.enter_context(patch.object(attention, "forward", MethodType(dense.forward, attention)))
        yield


def _time_pass(model: MoHLlamaForCausalLM, ids: torch.Tensor) -> float:
    synchronize(ids.device)  # an accelerator computes on after a call returns
    start = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    synchronize(ids.device)
    return time.perf_counter() - start
