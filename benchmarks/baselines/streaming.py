"""Streaming heads: attention to the first and the last tokens alone (DuoAttention: Xiao et al., arXiv 2410.10819).

DuoAttention's retrieval heads, the others, have full attention for all tokens. Here a head is a streaming head if that
costs least by the estimated KL on the calibration text, or if its score is among the lowest of all layers: retrieval
scores (`retrieval_heads.py`), or the gates that DuoAttention trains (`duo.py`).
"""

import torch
from transformers import PreTrainedConfig

from moh_llm.conversion.fit import LayerSample, RoutingFit
from moh_llm.conversion.local_fit import NO_TOKEN, LocalFitter
from moh_llm.conversion.plan import PlanOptions, drops_to_fit


class StreamingPlan(PlanOptions):
    """A plan whose local fallbacks have no distant token."""


class StreamingFitter(LocalFitter):
    """Plans of one layer whose local fallbacks have no distant token."""

    def fit_distant_token(self, sample: LayerSample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """No weight for what is out of sight; see `LocalFitter`."""
        assert sample.local is not None
        heads, inputs = len(sample.heads), sample.inputs
        score_bias = inputs.new_full((heads,), NO_TOKEN)
        value = inputs.new_zeros(heads, sample.heads.shape[-1])
        return inputs.new_zeros(heads, inputs.shape[1]), score_bias, value, sample.heads - sample.local.outputs


def make_streaming(plan: PlanOptions, config: PreTrainedConfig, sample: LayerSample) -> StreamingFitter:
    """What fits a layer for that plan, which names no shared heads."""
    return StreamingFitter(sample, plan.router_type, None, plan.heads_per_group(config))


def ranked_fits(scores: torch.Tensor, plan: PlanOptions, config: PreTrainedConfig) -> list[dict[int, RoutingFit]]:
    """Fits of each layer, by which a plan makes those heads streaming heads whose scores `[layers, H]` are lowest.

    A group's score is the sum of its heads'. A fit costs the scores that it drops, so that the plan of least cost drops
    the lowest of all layers.
    """
    size, layers = plan.heads_per_group(config), []
    for own in scores.double().unflatten(1, (-1, size)).sum(-1):
        order, fits = own.argsort(), {}  # of groups, the lowest score first
        for dropped in drops_to_fit(plan, config):
            parts = order[dropped // size :], order[: dropped // size]
            on, off = (sorted(int(group) * size + n for group in part for n in range(size)) for part in parts)
            tensors = {
                "fallback.distant_score.weight": torch.zeros(dropped, config.hidden_size),
                "fallback.distant_score.bias": torch.full((dropped,), NO_TOKEN),
                "fallback.distant_value": torch.zeros(dropped, config.head_dim),
            }
            fits[dropped] = RoutingFit(dropped, own[parts[1]].sum().item(), tensors if off else {}, on, off)
        layers.append(fits)
    return layers
