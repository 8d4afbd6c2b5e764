"""MoH-ViT on ViT, DeiT and DINOv2: what its layers compute, and that its folders load anywhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageClassification

from moh_llm import vision
from moh_llm.records.tensors import is_routing_weight
from moh_llm.vision import modeling_moh_vit
from moh_llm.vision.gated_heads_moh import batch_balance_loss

FAMILIES = ("ViT", "DeiT", "Dinov2")
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3}
SIZE |= {"image_size": 8, "patch_size": 4, "num_channels": 1}


def make(family: str, **plan) -> torch.nn.Module:
    """A classifier in double precision whose weights tell heads and classes apart."""
    torch.manual_seed(0)
    kind = "ForImageClassification"
    source, sizes = (vision, SIZE | plan) if plan else (transformers, SIZE)
    models = modeling_moh_vit if plan else transformers
    sizes = sizes if family == "Dinov2" else sizes | {"intermediate_size": 48}
    prefix = "MoH" if plan else ""
    model = getattr(models, f"{prefix}{family}{kind}")(getattr(source, f"{prefix}{family}Config")(**sizes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3)
    return model.double().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_heads_on_is_the_base_bit_for_bit(family, images):
    base = make(family).float()
    fallbacks = {"router_type": "linear", "head_fallback": "value"}
    moh = make(family, num_shared_heads=[1, 0], num_active_heads=2, **fallbacks).float()
    missing, unexpected = moh.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and all(map(is_routing_weight, missing))
    with torch.no_grad():
        expected = base(images.float()).logits
        assert not torch.equal(moh(images.float()).logits, expected)
        with moh.all_heads_active():
            assert torch.equal(moh(images.float()).logits, expected)


def naive_gates(router: torch.nn.Module, score: str, x: Tensor, shared: int, active: int) -> Tensor:
    """Gates `[H]` of one token with the input `x` `[C]`: Eq. 5 and 6, or the form of the authors' code."""
    k, gates = active - shared, torch.zeros(SIZE["num_attention_heads"], dtype=torch.float64)
    p = (router.routed.weight @ x).softmax(0)
    chosen = sorted(range(len(p)), key=lambda i: -p[i])[:k]
    stages = (router.stage.weight @ x).softmax(0) if shared else [1.0, 1.0]
    of_shared = (router.shared.weight @ x).softmax(0) if hasattr(router, "shared") else torch.ones(shared)
    for i in range(shared):
        weighted = stages[0] * of_shared[i]
        gates[i] = {"quantized": 1, "weighted": weighted}.get(score, 2 * shared * weighted)
    for i in chosen:
        share = p[i] / sum(p[j] for j in chosen)
        normalized = (2 if shared else 1) * stages[1] * k * share
        gates[shared + i] = {"quantized": 1, "weighted": stages[1] * p[i]}.get(score, normalized)
    return gates


@pytest.mark.parametrize(
    ("score", "shared"), [("quantized", 2), ("weighted", 2), ("normalized", 2), ("normalized", 1), ("normalized", 0)]
)
def test_a_layer_is_a_loop_over_tokens_and_heads(score, shared, images):
    active = shared + (1 if shared == 2 else 2)
    plan = {"num_shared_heads": shared, "num_active_heads": active, "router_type": "two_stage", "router_score": score}
    attention = make("ViT", **plan).vit.layers[1].attention
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        found, _ = attention(x)
        for row in range(2):
            q, k, v = (p(x[row]).view(5, 4, 8) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
            for token in range(5):
                gates, out = naive_gates(attention.router, score, x[row, token], shared, active), []
                for head in range(4):
                    pattern = (k[:, head] @ q[token, head] / 8**0.5).softmax(0)
                    out.append(gates[head] * (pattern @ v[:, head]))
                torch.testing.assert_close(found[row, token], attention.o_proj(torch.cat(out)))


def test_a_head_that_is_off_gives_its_fallback(images):
    plan = {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear", "head_fallback": "value"}
    attention = make("Dinov2", **plan).dinov2.encoder.layer[0].attention
    x = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    router, fallback = attention.router, attention.fallback
    query, key, value = (p(x).view(4, 4, 8) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    scores = x[0] @ router.routed.weight.T + router.routed.bias
    heads = torch.einsum("thd,shd->hts", query, key).div(8**0.5).softmax(-1) @ value.transpose(0, 1)
    expected = heads.transpose(0, 1).clone()
    for token in range(4):
        for i in {0, 1, 2} - {int(scores[token].argmax())}:
            share = fallback.own_value.weight[i] @ x[0, token] + fallback.own_value.bias[i]
            expected[token, 1 + i] = fallback.bias[i] + share * value[token, 1 + i]
    found, _ = attention(x)
    torch.testing.assert_close(found[0], attention.o_proj(expected.flatten(-2)))
    found.sum().backward()  # the gate's gradient <dO, H - S> reaches the router
    assert router.routed.weight.grad.abs().sum() > 0 and fallback.bias.grad.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_cross_entropy_and_balance_over_the_batch(family, images):
    plan = {"num_shared_heads": [1, 4], "num_active_heads": [2, 4], "router_type": "two_stage"}
    model = make(family, **plan, router_score="normalized", head_balance_coef=0.5)
    labels = torch.tensor([0, 2, 1])
    plain = model(images, labels=labels)
    assert "aux_loss" not in plain
    out = model(images, labels=labels, output_router_logits=True)
    logits = out.router_logits[0].flatten(0, 1)
    p, chosen = logits.softmax(-1).mean(0), logits.argmax(-1)
    # The authors' code: E times Eq. 7; the layer without routed heads is left out of the mean.
    expected = 3 * sum(p[i] * (chosen == i).double().mean() for i in range(3))
    assert [layer.shape[-1] for layer in out.router_logits] == [3, 0]
    torch.testing.assert_close(out.aux_loss, expected)
    torch.testing.assert_close(out.loss, plain.loss + 0.5 * expected)
    parts = [model(images[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=3).loss for i in range(3)]
    torch.testing.assert_close(sum(parts), plain.loss)
    model.routers[0].router_score = "weighted"
    torch.testing.assert_close(batch_balance_loss(out.router_logits, model.routers), expected / 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_router_logits_keep_their_gradient_under_checkpointing(family, images):
    model = make(family, num_shared_heads=1, num_active_heads=2, router_type="two_stage").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model(images, output_router_logits=True).aux_loss.requires_grad
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=False"):
        model(images, output_router_logits=True)
    assert len(model.eval()(images, output_router_logits=True).router_logits) == len(model.routers)


@pytest.fixture
def folder(request, images, tmp_path) -> Path:
    """A saved MoH model beside `base` and the images and logits of `expected.pt`."""
    make(request.param).float().save_pretrained(tmp_path / "base")
    moh = make(request.param, num_shared_heads=1, num_active_heads=2, router_type="linear", head_fallback="value")
    moh.float().save_pretrained(tmp_path / "moh")
    torch.save((images.float(), moh(images.float()).logits.detach()), tmp_path / "expected.pt")
    return tmp_path / "moh"


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_a_folder_has_the_bases_names(folder):
    of_base, own = (load_file(path / "model.safetensors") for path in (folder.with_name("base"), folder))
    assert of_base.keys() < own.keys()
    images, logits = torch.load(folder.with_name("expected.pt"))
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    assert type(model).__module__ == modeling_moh_vit.__name__ and torch.equal(model(images).logits, logits)
    # A base's file can be read, by its names.
    loaded = type(model).from_pretrained(folder.with_name("base"), config=model.config)
    with loaded.all_heads_active():
        base = AutoModelForImageClassification.from_pretrained(folder.with_name("base")).eval()
        assert torch.equal(loaded.eval()(images).logits, base(images).logits)
    for file in folder.glob("*.py"):
        assert not re.search(r"(import|from) moh_llm", file.read_text())


PROGRAM = """
import sys, torch
from transformers import AutoModelForImageClassification
images, logits = torch.load("expected.pt")
for folder in ("moh", "again"):
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
    assert torch.equal(model(images).logits, logits)
    model.save_pretrained("again")
assert not [name for name in sys.modules if name.startswith("moh_llm")]
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_a_process_without_moh_llm_loads_and_saves_a_folder(folder):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(folder.with_name("modules"))}
    command, cwd = [sys.executable, "-c", PROGRAM], folder.parent
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_fallback": "local"}, "head_fallback='local' is for text"),
        ({"routing_granularity": "kv_group"}, "routing_granularity='kv_group' is for text"),
        ({"num_active_heads": 5}, "num_active_heads=5 must lie between"),
    ],
)
def test_plans_that_images_cannot_have_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        vision.MoHViTConfig(**SIZE, **fields)
