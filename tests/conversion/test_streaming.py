"""Plans of streaming heads, which `benchmarks/local_plans.py` writes: of least estimated KL, and of lowest scores."""

import sys
from pathlib import Path

import pytest
import torch
from layer_samples import make_sample
from transformers import LlamaConfig

from moh_llm.conversion.local_fit import LocalFitter
from moh_llm.conversion.plan import PlanOptions, plan_layers, routing_tensors

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from baselines.streaming import StreamingPlan, make_streaming, ranked_fits


def test_a_streaming_head_gives_its_local_attention_and_nothing_else():
    sample, _ = make_sample(hidden=8)
    plan = PlanOptions(router="none", fallback="local", local_window=16, context=128, keys=0.6)
    config = LlamaConfig(hidden_size=8, num_attention_heads=4, num_hidden_layers=1, head_dim=3)
    fitter = make_streaming(plan, config, sample)
    assert fitter.residual.equal(sample.heads - sample.local.outputs)
    fit = fitter.fit(2)
    assert len(fit.never_on_heads) == 2 and len(fit.shared_heads) == 2
    tensors = fit.tensors
    share = (
        sample.inputs @ tensors["fallback.distant_score.weight"].T + tensors["fallback.distant_score.bias"]
    ).sigmoid()
    assert share.max() < 1e-30 and not fit.tensors["fallback.distant_value"].any()
    # What is never on costs most where its attention out of sight is most of it.
    missing = torch.einsum(
        "hnd,nhd->nh", fitter.residual[:, sample.fitted :], (sample.gradients @ sample.o_proj).unflatten(1, (4, -1))
    )
    expected = missing[:, fit.never_on_heads].sum(1).square().mean().item() / 2
    assert abs(fit.cost - expected) < 1e-5 * expected
    assert LocalFitter(sample, "none").fit(2).cost < fit.cost


@pytest.mark.parametrize("granularity", ["head", "kv_group"])
def test_heads_of_the_lowest_scores_of_all_layers_are_streaming_heads(granularity):
    config = LlamaConfig(
        hidden_size=8, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, head_dim=3, vocab_size=16
    )
    scores = torch.tensor([[0.9, 0.0, 0.1, 0.3], [0.0, 0.2, 0.8, 0.7], [0.6, 0.0, 0.5, 0.05]])
    # A group's score is the sum of its heads'; half of the heads are on.
    off = {"head": [[1, 2], [0, 1], [1, 3]], "kv_group": [[2, 3], [0, 1], [2, 3]]}[granularity]
    plan = StreamingPlan(
        router="none",
        fallback="local",
        local_window=16,
        context=128,
        num_active_heads=2,
        routing_granularity=granularity,
    )
    built, fits = plan_layers(plan, config, ranked_fits(scores, plan, config))
    assert built.never_on_heads == off
    assert built.shared_heads_per_layer == [sorted({0, 1, 2, 3} - {*heads}) for heads in off]
    tensors = routing_tensors(fits)
    assert len(tensors) == 9 and all(len(tensor) == 2 for tensor in tensors.values())
    assert all(tensor.max() < -50 if name.endswith("bias") else not tensor.any() for name, tensor in tensors.items())
