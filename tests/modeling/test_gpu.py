"""The same promises on a CUDA device."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from moh_llm import MoHCache, attention
from moh_llm.attention import flash, flex
from moh_llm.modeling.interval_attention_moh import NAME, reference_attention
from tests.modeling import test_forward as forward
from tests.modeling import test_masks as masks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("router_type", ["query_norm", "linear"])
def test_all_heads_active_is_the_base_bit_for_bit(make_pair, ids, dtype, implementation, router_type):
    dense, moh = make_pair(
        dtype=dtype, attn_implementation=implementation, num_shared_heads=1, num_active_heads=2, router_type=router_type
    )
    dense, moh, ids = dense.cuda(), moh.cuda(), ids.cuda()
    with torch.no_grad(), moh.all_heads_active():
        assert torch.equal(moh(ids).logits, dense(ids).logits)


BACKENDS = {"reference": (reference_attention, None), "flex": (flex.flex_attention, flex.why_not)}
BACKENDS["flash"] = flash.flash_attention, flash.why_not
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1}
WIDE |= {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear", "initializer_range": 0.05}
WIDE |= {"head_fallback": "local", "local_window": 64, "local_sinks": 4, "local_start": 100, "never_on_heads": [[3]]}
WIDE |= {"max_position_embeddings": 512}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch) -> list[str]:
    """Layers with heads off may take this backend alone; the list has its name each time that they do."""
    attend, why_not = BACKENDS[request.param]
    if request.param == "flash" and (lack := flash.lack(torch.device("cuda"), torch.bfloat16, 64)):
        pytest.skip(lack)
    taken = []

    def take(*args, **kwargs):
        taken.append(request.param)
        return attend(*args, **kwargs)

    if why_not is None:
        monkeypatch.setattr(attention, "reference_attention", take)
    monkeypatch.setattr(attention, "BACKENDS", {} if why_not is None else {request.param: (take, why_not)})
    return taken


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_each_backend_gives_the_logits_and_gradients_of_float32_on_a_cpu(make_pair, backend, packed, monkeypatch):
    _, moh = make_pair(**WIDE)
    ids = torch.randint(1, 257, (1, 300), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(110), torch.arange(190)])[None] if packed else torch.arange(300)[None]

    def run(device: str) -> dict[str, torch.Tensor]:
        moh.to(device).zero_grad()
        given = {"input_ids": ids, "position_ids": positions, "labels": ids}
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            out = moh(**{name: tensor.to(device) for name, tensor in given.items()}, use_cache=False)
        out.loss.backward()
        grads = {name: weight.grad for name, weight in moh.named_parameters() if weight.grad is not None}
        return {"logits": out.logits.detach().float().to("cpu", copy=True)} | {
            name: grad.to("cpu", copy=True) for name, grad in grads.items()
        }

    found = run("cuda")
    assert len(backend) == 2  # what a step computes, and what the gate's gradient needs beside it
    monkeypatch.delitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME)
    expected = run("cpu")
    assert found.keys() == expected.keys() and any("distant" in name for name in found)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 0.1 * tensor.norm(), name


@pytest.mark.parametrize("name", ["fallbacks", "local, start"])
def test_a_prefill_and_a_step_compile_as_one_graph(make_pair, ids, name):
    _, moh = make_pair(**forward.PLANS[name])
    forward.check_compiled(moh.cuda(), ids.cuda(), "inductor")


FLASH = pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs flash-attn")


@torch.no_grad()
@pytest.mark.parametrize("name", masks.PLANS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager", pytest.param("flash_attention_2", marks=FLASH)])
def test_padding_wherever_it_is_is_not_there(make_pair, name, implementation):
    _, moh = make_pair(dtype=torch.float64, **{"num_shared_heads": 1, "num_active_heads": 2} | masks.PLANS[name])
    mask, ids = masks.padding(), masks.some_ids()
    given = {"attention_mask": mask, "position_ids": masks.counted(mask)}
    shown, tolerance = mask.bool(), 1e-3
    expected = moh(ids, **given).logits[shown].float()
    moh.cuda().float()
    if implementation == "flash_attention_2":  # float16 and bfloat16 alone; close calls of routers differ
        moh.half()
        tolerance = 0.1 * expected.norm() / expected.numel() ** 0.5
    moh.set_attn_implementation(implementation)
    cuda = {key: tensor.cuda() for key, tensor in given.items()}

    def check(found: torch.Tensor) -> None:
        error = (found.float().cpu()[shown] - expected).abs()
        assert (error.mean() if implementation == "flash_attention_2" else error.max()) < tolerance

    check(moh(ids.cuda(), **cuda).logits)
    check(moh(ids.cuda(), **cuda | {"attention_mask": mask}).logits)  # which is on the CPU
    caches = [DynamicCache(config=moh.config)]
    if implementation in ("sdpa", "eager"):
        caches.append(StaticCache(moh.config, max_cache_len=30))
    if implementation == "sdpa":
        caches.append(MoHCache(moh.config))
    for cache in caches:
        check(masks.in_chunks(moh, ids.cuda(), mask.cuda(), [10, 12, 1, 1], cache))
