"""MoH-DiT on diffusers' DiT: what its layers compute, the published plans, saving, and the pipeline."""

import importlib.util
from pathlib import Path

import pytest
import torch
import yaml

from moh_llm import vision
from moh_llm.errors import UserError
from moh_llm.records.tensors import is_routing_weight
from moh_llm.vision.gated_heads_moh import batch_balance_loss

diffusers = pytest.importorskip("diffusers")

ARCHITECTURES = Path(__file__).parents[2] / "recipes" / "architectures"
SIZE = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "out_channels": 8}
NORMALIZED = {"router_type": "two_stage", "router_score": "normalized"}


def make(**plan) -> torch.nn.Module:
    torch.manual_seed(0)
    return (vision.MoHDiTTransformer2DModel if plan else diffusers.DiTTransformer2DModel)(**SIZE, **plan).eval()


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    latents = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    return latents, torch.tensor([5, 300, 990]), torch.tensor([1, 2, 1000])


def test_all_heads_on_is_the_base_bit_for_bit(inputs):
    base = make()
    moh = make(num_shared_heads=[1, 0], num_active_heads=2, router_type="linear", head_fallback="value")
    missing, unexpected = moh.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and all(map(is_routing_weight, missing))
    with torch.no_grad():
        assert not torch.equal(moh(*inputs).sample, base(*inputs).sample)
        with moh.all_heads_active():
            assert torch.equal(moh(*inputs).sample, base(*inputs).sample)


def test_a_processor_weighs_heads_and_hands_out_its_logits(inputs):
    """The weights themselves are proved on ViT's attention, which gates by the same code."""
    model = make(num_shared_heads=2, num_active_heads=[3, 2], heads_per_layer=[4, 6], **NORMALIZED).double()
    attention, x = model.transformer_blocks[0].attn1, torch.randn(2, 5, 32, dtype=torch.float64)
    assert [block.attn1.to_q.weight.shape for block in model.transformer_blocks] == [(32, 32), (48, 32)]
    with torch.no_grad():
        _, gates = attention.processor.router(x, x)
        query, key, value = (p(x).view(2, 5, 4, 8) for p in (attention.to_q, attention.to_k, attention.to_v))
        heads = [[] for _ in range(4)]
        for head in range(4):
            pattern = (query[:, :, head] @ key[:, :, head].mT / 8**0.5).softmax(-1)
            heads[head] = gates[..., head, None] * (pattern @ value[:, :, head])
        torch.testing.assert_close(attention(x), attention.to_out[0](torch.cat(heads, dim=-1)))
        logits = []
        latents, timestep, labels = inputs
        model(latents.double(), timestep, labels, cross_attention_kwargs={"router_logits": logits})
    assert [layer.shape for layer in logits] == [(3, 16, 2), (3, 16, 4)]
    # K / U, times U in the authors' form, if load and scores are even: about K = 1 and 0, in the mean.
    assert 0.3 < batch_balance_loss(logits, model.routers) < 1.2


# As published: heads in use, of all.
ACTIVE = {"s2_90": (64, 72), "s2_75": (54, 72), "b2_90": (129, 144), "b2_75": (108, 144)}
ACTIVE |= {"l2_90": (344, 384), "l2_75": (288, 384), "xl2_90": (403, 448), "xl2_75": (336, 448)}
WEIGHTS = {"s2": 33, "b2": 131, "l2": 459, "xl2": 676}  # millions, as published


def test_architectures_are_the_published_plans():
    assert {path.stem for path in ARCHITECTURES.glob("moh_dit_*")} == {f"moh_dit_{name}" for name in ACTIVE}
    for name, (active, heads) in ACTIVE.items():
        with torch.device("meta"):
            fields = yaml.safe_load((ARCHITECTURES / f"moh_dit_{name}.yaml").read_text())
            model = vision.MoHDiTTransformer2DModel(**fields)
        assert sum(router.num_heads for router in model.routers) == heads
        assert sum(router.num_active for router in model.routers) == active
        # DiT has one embedder of timestep and class, diffusers one in each block; DiT's places are counted as weights.
        sizes = {name: weight.numel() for name, weight in model.named_parameters()}
        more = sum(size for weight, size in sizes.items() if ".norm1.emb." in weight and ".0." not in weight)
        places = (model.config.sample_size // model.config.patch_size) ** 2 * model.inner_dim
        assert round((sum(sizes.values()) - more + places) / 1e6) == WEIGHTS[name.partition("_")[0]]
    first, last = model.routers[0], model.routers[-1]  # of XL/2-75
    assert (first.num_shared, first.top_k, last.num_shared, last.top_k, last.num_heads) == (8, 0, 14, 2, 24)


def test_it_saves_loads_and_runs_in_the_pipeline(inputs, tmp_path):
    model = make(num_shared_heads=1, num_active_heads=[2, 3], heads_per_layer=[4, 3], **NORMALIZED)
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=32)
    diffusers.DiTPipeline(model, vae, diffusers.DDIMScheduler()).save_pretrained(tmp_path)
    again = vision.MoHDiTTransformer2DModel.from_pretrained(tmp_path / "transformer").eval()
    with torch.no_grad():
        assert torch.equal(again(*inputs).sample, model(*inputs).sample)
    pipeline = diffusers.DiTPipeline.from_pretrained(tmp_path)
    assert type(pipeline.transformer) is type(model)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline([1, 2], num_inference_steps=2, output_type="np").images.shape == (2, 8, 8, 3)


def test_without_diffusers_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package diffusers.*pip install 'moh-llm\[vision\]'"):
        vision.MoHDiTTransformer2DModel  # noqa: B018
