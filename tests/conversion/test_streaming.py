"""Plans of streaming heads in the manner of DuoAttention, which `benchmarks/local_plans.py --streaming` writes."""

import sys
from pathlib import Path

import torch
from layer_samples import make_sample
from transformers import LlamaConfig

from moh_llm.conversion.local_fit import LocalFitter
from moh_llm.conversion.plan import PlanOptions

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from baselines.streaming import make_streaming


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
