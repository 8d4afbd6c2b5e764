"""Streaming heads: attention to the first and the last tokens alone (DuoAttention: Xiao et al., arXiv 2410.10819).

There a gate of each key-value head is trained on long synthetic text, and heads of low gates attend to sinks and a
window for all tokens. Here the heads are those of least estimated KL on the calibration text. With `router="none"` the
others, DuoAttention's retrieval heads, have full attention.
"""

import torch
from transformers import PreTrainedConfig

from moh_llm.conversion.fit import LayerSample
from moh_llm.conversion.local_fit import NO_TOKEN, LocalFitter
from moh_llm.conversion.plan import PlanOptions


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
