"""Two sweeps over the base's layers on disk, one layer in memory at a time.

Forward, each layer's input is written beside the output to be. Backward, each layer is run again
and the gradient of -log p(y), with y drawn from the model itself, is carried through it: this gives
the effect of each direction of an attention output on the model's predictions, for all layers in one
backward pass.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.conversion.base import moh_fields
from moh_llm.conversion.fit import LayerSample
from moh_llm.conversion.layers import LayerwiseModel, check_finite, run_layer
from moh_llm.conversion.local_sample import LocalSample, sample_local
from moh_llm.errors import UserError
from moh_llm.flops import forward_parts
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.modeling.seen_moh import document_starts
from moh_llm.progress import TextProgress
from moh_llm.records.model import save_tensors

HELD_OUT = 4  # every fourth window measures costs and is not fitted on
_LEAST = 16  # tokens with keys out of sight that a fit, and its check on other tokens, take
FORWARD, BACKWARD = "forward", "backward"  # passes over the text
_FITS = 1.15  # fits and local attention's samples beside the backward pass of a layer, measured at 512 tokens
_HEAD_ROWS = 128  # tokens whose distribution over the vocabulary is held at once


def layer_samples(
    base: LayerwiseModel,
    batches: Sequence[Batch],
    windows: Collection[tuple[int, int]],
    skipped: int,
    scratch: Path,
    seed: int = 0,
) -> Iterator[tuple[LayerSample, dict[tuple[int, int], LocalSample]]]:
    """What the batches show of each layer, the last layer first, and local attention's part by window and sinks.

    The first `skipped` tokens of each document are left out. Other arguments are those of `calibrate`.

    Raises:
        UserError: next to no token is left.
    """
    order, fitted = _fitted_first(batches, skipped)
    if windows and min(fitted, len(order) - fitted) < _LEAST:
        raise UserError(
            f"the calibration text has {len(order)} tokens that are more than {skipped} after the first "
            "of their document, too few to fit local fallbacks; give longer documents (--calibration), more of them "
            "(--calibration-tokens), or --fallback value"
        )
    positions = [batch["position_ids"] for batch in batches]
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    work, share_of_head = _work_of_passes(base.config, batches[0]["input_ids"].shape[1])
    with TextProgress("calibrate", tokens, work) as progress:
        hidden = base.embed(batch["input_ids"] for batch in batches)
        with torch.no_grad():
            for number in range(len(base)):
                save_tensors({str(i): states for i, states in enumerate(hidden)}, _states_file(scratch, number))
                layer = base.layer(number)
                for i, states in enumerate(hidden):
                    hidden[i] = run_layer(layer, states, positions[i])
                    check_finite(hidden[i], number)
                    progress.advance(FORWARD, positions[i].numel() / len(base))
                del layer
        gradients = []
        for gradient in _sampled_gradients(base.head(), hidden, seed):
            check_finite(gradient, len(base), "the gradient below")
            gradients.append(gradient)
            progress.advance(BACKWARD, share_of_head * gradient.shape[:-1].numel())
        for number in reversed(range(len(base))):
            file = _states_file(scratch, number)
            yield _backward(base, number, file, positions, gradients, order, fitted, windows)
            file.unlink()
            progress.advance(BACKWARD, (1 - share_of_head) * tokens / len(base))


def _work_of_passes(config: PreTrainedConfig, length: int) -> tuple[dict[str, float], float]:
    """FLOPs of the forward and the backward pass over sequences of `length` tokens, and the head's share of the latter.

    The backward pass runs each layer again, takes the gradient by its input (of attention 2.5 products for each of the
    forward pass), and fits the layer.
    """
    dense = MoHLlamaConfig(**moh_fields(config), num_shared_heads=0, num_active_heads=1)
    parts = forward_parts(dense, length, dense=True)
    head, attention = parts.pop("vocabulary"), parts.pop("scores and weighted sums")
    linear = sum(parts.values())
    backward = _FITS * (2 * linear + 3.5 * attention)
    return {FORWARD: linear + attention, BACKWARD: 2 * head + backward}, 2 * head / (2 * head + backward)


def _states_file(scratch: Path, number: int) -> Path:
    return scratch / f"hidden-states-{number}.safetensors"


def _sampled_gradients(head: nn.Sequential, hidden: Sequence[torch.Tensor], seed: int) -> Iterator[torch.Tensor]:
    """Gradient by the last hidden states of the summed -log p(y), y drawn from p itself.

    Written out, softmax(logits) - onehot(y): a wide vocabulary makes autograd and `multinomial` slow.
    """
    norm, linear = head
    back = linear.weight.T.contiguous()  # as it lies, a product in bfloat16 takes 15 times as long on some CPUs
    generator = torch.Generator(hidden[0].device).manual_seed(seed)
    for states in hidden:
        rows = states.flatten(0, 1)
        uniform = torch.rand(len(rows), 1, generator=generator, device=rows.device)
        parts = []
        for part, level in zip(rows.split(_HEAD_ROWS), uniform.split(_HEAD_ROWS), strict=True):
            part = part.detach().requires_grad_(True)
            with torch.enable_grad():
                normed = norm(part)
            gradient = linear(normed.detach()).float().softmax(-1)
            cumulated = gradient.cumsum(-1)
            drawn = torch.searchsorted(cumulated, level * cumulated[:, -1:]).clamp_max(gradient.shape[-1] - 1)
            gradient.scatter_add_(-1, drawn, -torch.ones_like(level))
            by_normed = nn.functional.linear(gradient.to(back.dtype), back)
            parts.append(torch.autograd.grad(normed, part, by_normed)[0])
        yield torch.cat(parts).view_as(states)


def _fitted_first(batches: Sequence[Batch], skipped: int) -> tuple[torch.Tensor, int]:
    """An order of tokens with the held-out ones last, and how many come before them.

    Documents' first `skipped` tokens are left out: they have all heads on, or fallbacks that are exact.
    """
    positions = torch.cat([_within_documents(batch["position_ids"]).flatten() for batch in batches])
    length = batches[0]["input_ids"].shape[1]
    window = torch.arange(len(positions)) // length
    held_out = window % HELD_OUT == HELD_OUT - 1
    if len(positions) < HELD_OUT * length:
        held_out = torch.arange(len(positions)) >= len(positions) - len(positions) // HELD_OUT
    counted = positions >= skipped
    fitted = (counted & ~held_out).nonzero()[:, 0]
    return torch.cat([fitted, (counted & held_out).nonzero()[:, 0]]), len(fitted)


def _within_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """How many tokens of its document are before each token in its row, `[B, T]`."""
    positions, starts = document_starts(position_ids, None, position_ids, None, False, "sdpa")
    return positions - starts


def _backward(
    base: LayerwiseModel,
    number: int,
    file: Path,
    positions: Sequence[torch.Tensor],
    gradients: list[torch.Tensor],
    order: torch.Tensor,
    fitted: int,
    windows: Iterable[tuple[int, int]],
) -> tuple[LayerSample, dict[tuple[int, int], LocalSample]]:
    """Run a layer again on its stored input; replaces `gradients` by those of its input.

    Returns:
        The layer's sample, and those of local attention by window and sinks.
    """
    layer = base.layer(number)
    attention = layer.layers[0].self_attn
    seen: dict[str, list[torch.Tensor]] = {"inputs": [], "heads": [], "values": [], "gradients": []}
    samples: dict[tuple[int, int], list[LocalSample]] = {window: [] for window in windows}
    with (
        _recording(attention, seen, samples),
        safe_open(file, framework="pt", device=str(base.device)) as stored,
    ):
        for i, position_ids in enumerate(positions):
            states = stored.get_tensor(str(i)).clone().requires_grad_(True)
            with torch.enable_grad():
                output = run_layer(layer, states, position_ids)
            gradients[i] = torch.autograd.grad(output, states, gradients[i])[0]
    heads, size = base.config.num_attention_heads, attention.head_dim

    def by_head(name: str) -> torch.Tensor:
        rows = torch.cat(seen.pop(name))[order].unflatten(-1, (-1, size)).transpose(0, 1)
        return rows.repeat_interleave(heads // len(rows), dim=0).float().contiguous()

    gradient = torch.cat(seen.pop("gradients")).float()
    sample = LayerSample(
        inputs=torch.cat(seen.pop("inputs"))[order].float(),
        heads=by_head("heads"),
        values=by_head("values"),
        sensitivity=gradient.T @ gradient / len(gradient),
        gradients=gradient[order[fitted:]],
        o_proj=attention.o_proj.weight.float(),
        fitted=fitted,
    )
    return sample, {window: LocalSample.join(samples.pop(window), order) for window in [*samples]}


@contextmanager
def _recording(
    attention: nn.Module,
    seen: dict[str, list[torch.Tensor]],
    samples: dict[tuple[int, int], list[LocalSample]],
) -> Iterator[None]:
    """Keep the attention's input, head outputs, values, and the gradient by its output, a row per token.

    And local attention's samples, for each window and number of sinks that `samples` has.
    """

    def keep(name: str, tensor: torch.Tensor) -> None:
        seen[name].append(tensor.detach().flatten(0, -2))

    def keep_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
        keep("inputs", kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handles = [
        attention.register_forward_pre_hook(keep_input, with_kwargs=True),
        attention.v_proj.register_forward_hook(lambda module, args, output: keep("values", output)),
        attention.o_proj.register_forward_pre_hook(lambda module, args: keep("heads", args[0])),
        attention.o_proj.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda gradient: keep("gradients", gradient)) and None
        ),
    ]
    name = attention.config._attn_implementation
    compute = ALL_ATTENTION_FUNCTIONS[name]

    def compute_both(module: nn.Module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *args, **more):
        places = document_starts(queries[:, 0], None, more["position_ids"], None, False, name)
        for window, found in samples.items():
            found.append(sample_local(queries, keys, values, *places, *window, module.scaling))
        return compute(module, queries, keys, values, *args, **more)

    if samples:
        ALL_ATTENTION_FUNCTIONS[name] = compute_both
    try:
        yield
    finally:
        if samples:
            del ALL_ATTENTION_FUNCTIONS[name]
        for handle in handles:
            handle.remove()
