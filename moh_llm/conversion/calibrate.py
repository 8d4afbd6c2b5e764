"""Calibration: each layer is fitted to what two sweeps over the base show of it, one layer in memory at a time.

The forward sweep writes each layer's input to disk. The backward sweep runs each layer again and carries the gradient
of -log p(y) through it, with y drawn from the model itself: this gives the effect of each direction of an attention
output on the model's predictions, for all layers in one backward pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.conversion.config import PlanOptions
from moh_llm.conversion.fit import LayerFitter, LayerSample, LocalSample, RoutingFit
from moh_llm.conversion.layers import LayerwiseModel, check_finite, run_layer
from moh_llm.conversion.local_fit import LocalFitter, sample_local
from moh_llm.conversion.plan import drops_to_fit, shared_and_active
from moh_llm.errors import UserError
from moh_llm.metrics import Batch
from moh_llm.modeling.seen_moh import Seen, document_starts
from moh_llm.records.model import save_tensors

HELD_OUT = 4  # every fourth window measures costs and is not fitted on
_LEAST = 16  # least tokens with keys out of sight, to fit on and to measure costs on
_BACKWARD = 3  # times as long as the forward pass: it runs each layer again, and fits it
_HEAD_ROWS = 128  # tokens whose logits are held at once


def make_fitter(plan: PlanOptions, config: PreTrainedConfig, sample: LayerSample) -> LayerFitter | LocalFitter:
    """The fitter of a layer for that plan, for any number of dropped heads."""
    shared, group_size = shared_and_active(plan, config)[0], plan.heads_per_group(config)
    chosen = shared if plan.shared == "importance" else list(range(shared))
    if plan.head_fallback == "local":
        return LocalFitter(sample, plan.router_type, None if plan.mixes else chosen, group_size)
    return LayerFitter(sample, chosen, plan.head_fallback == "value", group_size, plan.router_type != "none")


def calibrate(
    base: LayerwiseModel, batches: Sequence[Batch], plan: PlanOptions, scratch: Path, seed: int = 0
) -> list[dict[int, RoutingFit]]:
    """The fits of each layer of a dense base, by the number of heads that a token drops.

    `batches` of calibration text have `input_ids` and `position_ids` `[B, T]`. `scratch` is a folder for the hidden
    states: tokens x hidden size x layers numbers. `seed` draws the labels y.
    """
    samples = layer_samples(base, batches, plan, scratch, seed)
    return [fit_layer(plan, base.config, make_fitter(plan, base.config, sample)) for sample in samples][::-1]


def fit_layer(plan: PlanOptions, config: PreTrainedConfig, fitter: LayerFitter | LocalFitter) -> dict[int, RoutingFit]:
    """A layer's fits, for all numbers of dropped heads that the plan may give it."""
    fits = {dropped: fitter.fit(dropped) for dropped in drops_to_fit(plan, config)}
    # Where nothing is routed, or by a router without weights, only which heads are shared is found.
    return fits or {0: RoutingFit(0, 0.0, {}, fitter.shared_heads)}


def layer_samples(
    base: LayerwiseModel, batches: Sequence[Batch], plan: PlanOptions, scratch: Path, seed: int = 0
) -> Iterator[LayerSample]:
    """Yield the sample of each layer, the last layer first. The arguments are those of `calibrate`.

    The first token of each document is left out, and with local fallbacks all tokens that have all heads on.

    Raises:
        UserError: too few tokens are left.
    """
    is_local = plan.head_fallback == "local"
    skipped = plan.all_heads_until if is_local else 1
    order, fitted = _fitted_first(batches, skipped)
    if is_local and min(fitted, len(order) - fitted) < _LEAST:
        raise UserError(
            f"the calibration text has {len(order)} tokens that are more than {skipped} after the first "
            "of their document, too few to fit local fallbacks; give longer documents (--calibration), more of them "
            "(--calibration-tokens), or --fallback value"
        )
    positions = [batch["position_ids"] for batch in batches]
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    layer_work = tokens / (len(base) + _BACKWARD * (len(base) + 1))  # of a layer in the forward pass, out of all tokens
    with tqdm(desc="calibrate", total=tokens, unit="token", unit_scale=True, smoothing=0, leave=False) as bar:
        files = [scratch / f"hidden-states-{number}.safetensors" for number in range(len(base))]
        hidden = base.embed(batch["input_ids"] for batch in batches)
        with torch.no_grad():
            for number in range(len(base)):
                save_tensors({str(i): states for i, states in enumerate(hidden)}, files[number])
                layer = base.layer(number)
                for i, states in enumerate(hidden):
                    hidden[i] = run_layer(layer, states, positions[i])
                    check_finite(hidden[i], number)
                del layer
                bar.update(layer_work)
        gradients = []
        for gradient in _sampled_gradients(base.head(), hidden, seed):
            check_finite(gradient, len(base), "the gradient below")
            gradients.append(gradient)
        bar.update(_BACKWARD * layer_work)
        for number in reversed(range(len(base))):
            sight = (plan.window, plan.local_sinks) if is_local else None
            yield _backward(base, number, files[number], positions, gradients, order, fitted, sight)
            files[number].unlink()
            bar.update(_BACKWARD * layer_work)


def _sampled_gradients(head: nn.Sequential, hidden: Sequence[torch.Tensor], seed: int) -> Iterator[torch.Tensor]:
    """Gradient by the last hidden states of the summed -log p(y), y drawn from p itself.

    It is softmax(logits) - onehot(y), written out: autograd and `multinomial` are slow for a large vocabulary.
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
    """An order of tokens with the held-out ones last, and the number of tokens before these.

    The first `skipped` tokens of each document are left out: they have all heads on, or exact fallbacks.
    """
    found = []
    for positions in (batch["position_ids"] for batch in batches):
        place, start = document_starts(positions, None, positions, None, False, "sdpa")
        found.append((place - start).flatten())
    positions = torch.cat(found)
    length = batches[0]["input_ids"].shape[1]
    window = torch.arange(len(positions)) // length
    held_out = window % HELD_OUT == HELD_OUT - 1
    if len(positions) < HELD_OUT * length:
        held_out = torch.arange(len(positions)) >= len(positions) - len(positions) // HELD_OUT
    counted = positions >= skipped
    fitted = (counted & ~held_out).nonzero()[:, 0]
    return torch.cat([fitted, (counted & held_out).nonzero()[:, 0]]), len(fitted)


def _backward(
    base: LayerwiseModel,
    number: int,
    file: Path,
    positions: Sequence[torch.Tensor],
    gradients: list[torch.Tensor],
    order: torch.Tensor,
    fitted: int,
    sight: tuple[int, int] | None,
) -> LayerSample:
    """Run a layer again on its stored input, replace `gradients` by those of this input, and return its sample.

    ``sight`` has the numbers of tokens of the window and of the sinks of local attention, if the sample needs it.
    """
    layer = base.layer(number)
    attention = layer.layers[0].self_attn
    seen: dict[str, list[torch.Tensor]] = {}
    local: list[LocalSample] = []
    recorded = recording(attention, attention.v_proj, attention.o_proj, seen, local, sight)
    with recorded, safe_open(file, framework="pt", device=str(base.device)) as stored:
        for i, position_ids in enumerate(positions):
            states = stored.get_tensor(str(i)).clone().requires_grad_(True)
            with torch.enable_grad():
                output = run_layer(layer, states, position_ids)
            gradients[i] = torch.autograd.grad(output, states, gradients[i])[0]
    joined = LocalSample.join(local, order) if sight else None
    return join_sample(seen, attention.o_proj, base.config.num_attention_heads, order, fitted, local=joined)


def join_sample(
    seen: dict[str, list[torch.Tensor]], out: nn.Linear, heads: int, order: torch.Tensor, fitted: int, **more: Any
) -> LayerSample:
    """The sample of what `recording` saw of an attention with these heads, which is removed from `seen`.

    `out` is the output projection. `order` has the rows to take, and those after the first `fitted` are held out.
    """

    def by_head(name: str) -> torch.Tensor:
        rows = torch.cat(seen.pop(name))[order].unflatten(-1, (-1, out.in_features // heads)).transpose(0, 1)
        return rows.repeat_interleave(heads // len(rows), dim=0).float().contiguous()

    gradient = torch.cat(seen.pop("gradients")).float()
    return LayerSample(
        inputs=torch.cat(seen.pop("inputs"))[order].float(),
        heads=by_head("heads"),
        values=by_head("values"),
        sensitivity=gradient.T @ gradient / len(gradient),
        gradients=gradient[order[fitted:]],
        o_proj=out.weight.float(),
        fitted=fitted,
        **more,
    )


@contextmanager
def recording(
    attention: nn.Module,
    value: nn.Module,
    out: nn.Module,
    seen: dict[str, list[torch.Tensor]],
    local: list[LocalSample] | None = None,
    sight: tuple[int, int] | None = None,
) -> Iterator[None]:
    """Collect inputs, head outputs, values and gradients, a row per token, and samples of local attention.

    `value` and `out` are the attention's projections to values and from head outputs.
    """

    def keep(name: str, tensor: torch.Tensor) -> None:
        seen.setdefault(name, []).append(tensor.detach().flatten(0, -2))

    def keep_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
        keep("inputs", kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handles = [
        attention.register_forward_pre_hook(keep_input, with_kwargs=True),
        value.register_forward_hook(lambda module, args, output: keep("values", output)),
        out.register_forward_pre_hook(lambda module, args: keep("heads", args[0])),
        out.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda gradient: keep("gradients", gradient)) and None
        ),
    ]
    name = attention.config._attn_implementation if sight else ""
    compute = ALL_ATTENTION_FUNCTIONS.get(name)

    def compute_both(module: nn.Module, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *args, **more):
        places = document_starts(queries[:, 0], None, more["position_ids"], None, False, name)
        local.append(sample_local(queries, keys, values, Seen.from_positions(*places, *sight), module.scaling))
        return compute(module, queries, keys, values, *args, **more)

    if sight:
        ALL_ATTENTION_FUNCTIONS[name] = compute_both
    try:
        yield
    finally:
        if sight:
            del ALL_ATTENTION_FUNCTIONS[name]
        for handle in handles:
            handle.remove()
