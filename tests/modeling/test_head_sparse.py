"""Head-sparse attention against a dense float64 reference and against the masked path.

Without a GPU the kernels run in Triton's interpreter; the same tests run compiled on one.
"""

import pytest
import torch

from moh_llm.kernels import head_sparse
from moh_llm.kernels.head_sparse import head_sparse_attention
from moh_llm.kernels.head_sparse_kernels import all_positions, selected_positions

pytest.importorskip("triton")

pytestmark = pytest.mark.slow  # without a GPU Triton interprets
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PLANS = [
    {"router_type": "query_norm", "num_shared_heads": 1, "num_active_heads": 2},
    {"router_type": "linear", "head_fallback": "value", "num_shared_heads": 1, "num_active_heads": [2, 3]},
    {"router_type": "linear", "num_shared_heads": 1, "num_active_heads": 2, "shared_heads": [[2], [3]]},
    {"router_type": "two_stage", "router_score": "weighted", "num_shared_heads": 2, "num_active_heads": 3},
    {
        "router_type": "linear",
        "routing_granularity": "kv_group",
        "head_fallback": "value",
        "num_shared_heads": 0,
        "num_active_heads": 2,
    },
]


def reference(q, k, v, gate, scaling, first=None, key_mask=None):
    """Causal attention with every score written out, in float64."""
    q, k, v, gate = (x.double() for x in (q, k, v, gate))
    (_, heads, length, _), (groups, keys) = q.shape, k.shape[1:3]
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    n, last = torch.arange(keys, device=q.device), torch.arange(keys - length, keys, device=q.device)
    seen = (n[None, :] <= last[:, None]).expand(q.shape[0], -1, -1)
    if first is not None:
        seen = seen & (n >= first[:, :, None])
    if key_mask is not None:
        seen = seen & (key_mask[:, None, :] != 0)
    scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(~seen[:, None], -torch.inf)
    return (torch.nan_to_num(scores.softmax(-1)) @ v).transpose(1, 2) * gate.unsqueeze(-1)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to the reference's."""
    assert got.isfinite().all()
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def draw(batch, heads, groups, length, keys, size, share, dtype=torch.float32):
    """Queries, keys, values, a hard gate, soft scores and an incoming gradient."""
    source = torch.Generator().manual_seed(length * size)
    tensors = [torch.randn(batch, length, heads, size, generator=source).transpose(1, 2)]
    tensors += [torch.randn(batch, groups, keys, size, generator=source) for _ in range(2)]
    hard = (torch.rand(batch, length, heads, generator=source) < share).float()
    soft = torch.rand(batch, length, heads, generator=source)
    grad = torch.randn(batch, length, heads, size, generator=source)
    q, k, v, grad = (x.to(DEVICE, dtype) for x in (*tensors, grad))
    return q, k, v, hard.to(DEVICE), soft.to(DEVICE), grad


def compare(drawn, first=None, key_mask=None, tolerance=1e-5, all_heads=True):
    """Output and all gradients of both, one after the other."""
    *inputs, hard, soft, grad = drawn
    found = []
    for attend in (head_sparse_attention, reference):
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs, soft)]
        gate = hard + (leaves[3] - leaves[3].detach())
        extra = {"all_heads": all_heads} if attend is head_sparse_attention else {}
        out = attend(*leaves[:3], gate, 0.3, first=first, key_mask=key_mask, **extra)
        out.backward(grad.to(out.dtype))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    if not all_heads:
        assert not found[0][4][hard == 0].any()
        found[1][4] = found[1][4] * hard
    for name, got, expected in zip(("out", "q", "k", "v", "gate"), *found, strict=True):
        assert distance(got, expected.double()) < tolerance, name


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_lists_hold_the_selected_positions_in_order(share):
    length = 2050  # the kernel goes on where a block of it ended
    gate = (torch.rand(2, length, 3, generator=torch.Generator().manual_seed(0)) < share).float().to(DEVICE)
    rows, counts, before = selected_positions(gate)
    for b in range(2):
        for h in range(3):
            expected = gate[b, :, h].nonzero()[:, 0]
            assert torch.equal(rows[b, h, : counts[b, h]].long(), expected)
            assert torch.equal(before[b, h].long(), gate[b, :, h].long().cumsum(0) - gate[b, :, h].long())
    if share == 1:
        for got, expected in zip(all_positions(2, length, 3, rows.device), (rows, counts, before), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "share"),
    [
        ((2, 4, 2, 70, 70, 64), torch.float32, 0.75),
        ((1, 3, 3, 33, 50, 80), torch.float32, 0.5),  # keys from a cache, a head size that is no power of two
        ((1, 4, 1, 40, 40, 96), torch.float32, 0.5),
        ((1, 2, 1, 1, 35, 128), torch.float32, 0.9),  # one new token
        ((2, 2, 2, 40, 40, 16), torch.float32, 0.0),
        ((2, 2, 2, 40, 40, 16), torch.float32, 1.0),
        ((1, 4, 1, 130, 130, 64), torch.bfloat16, 0.75),
        ((1, 4, 2, 130, 130, 128), torch.float16, 0.5),
    ],
)
def test_output_and_gradients_are_those_of_the_reference(shape, dtype, share):
    compare(draw(*shape, share, dtype), tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("seed", [0, 1])
def test_packed_documents_and_padding(seed):
    """Random documents: some longer than a tile, some shorter, so that whole blocks and edges of all kinds occur."""
    source = torch.Generator().manual_seed(seed)
    length, groups = int(torch.randint(65, 100, (), generator=source)), 2 - seed
    drawn = draw(2, 2, groups, length, length, 16, 0.3 + 0.3 * seed)
    starts = torch.rand(2, length, generator=source) < 3 / length
    first = torch.where(starts, torch.arange(length), 0).cummax(-1).values.to(DEVICE, torch.int32)
    compare(drawn, first=first)
    key_mask = torch.ones(2, length, dtype=torch.int8, device=DEVICE)
    key_mask[1, :13], key_mask[0, 40:45] = 0, 0
    compare(drawn, key_mask=key_mask)
    compare(drawn, first=first, key_mask=key_mask)


def test_documents_and_lists_of_any_length():
    starts = torch.tensor([31, 36, 40, 44, 48, 52, 56, 60])[:, None]  # around the ends of tiles
    drawn = draw(len(starts), 1, 1, 70, 70, 16, 0.9)
    compare(drawn, first=torch.where(torch.arange(70) >= starts, starts, 0).to(DEVICE, torch.int32))
    drawn = draw(1, 2, 1, 100, 100, 16, 0.7)
    first = torch.randint(0, 100, (1, 100), generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(DEVICE)
    compare(drawn, first=first)
    drawn = list(draw(1, 4, 2, 70, 70, 32, 0.5))
    drawn[3][..., 0], drawn[3][..., 1], drawn[3][:, 1:, 2] = 0, 1, 0
    compare(drawn)


def test_the_cheaper_gradient_leaves_out_heads_that_are_off():
    compare(draw(1, 4, 2, 50, 50, 32, 0.5), all_heads=False)


def test_what_nobody_selected_does_not_reach_the_output():
    q, k, v, hard, _, _ = draw(1, 4, 2, 50, 50, 32, 0.5)
    off = (hard == 0).transpose(1, 2)
    for all_heads in (False, True):  # which differ in how products are grouped, so by rounding on some processors
        clean = head_sparse_attention(q, k, v, hard, 0.3, all_heads=all_heads)
        bad = torch.where(torch.arange(50, device=DEVICE) % 2 == 0, torch.nan, torch.inf)[:, None]
        dirty = torch.where(off.unsqueeze(-1), bad, q)
        assert torch.equal(head_sparse_attention(dirty, k, v, hard, 0.3, all_heads=all_heads), clean)


def both(make_pair, **plan):
    """The same model on the masked path and on the kernels."""
    _, masked = make_pair(**plan)
    sparse = type(masked).from_pretrained(masked.config._name_or_path, attn_implementation="moh_sparse").eval()
    assert sparse.config._attn_implementation == "moh_sparse"
    return masked.to(DEVICE), sparse.to(DEVICE)


def test_the_gradient_of_the_gate_is_set_on_the_model(make_pair, ids, monkeypatch):
    _, sparse = both(make_pair, **PLANS[1])
    seen, attend = [], head_sparse.head_sparse_attention
    monkeypatch.setattr(head_sparse, "head_sparse_attention", lambda *a: seen.append(a[-1]) or attend(*a))
    for kind in ("exact", "selected"):
        sparse.set_sparse_gate_gradient(kind)
        sparse(ids[:1].to(DEVICE), use_cache=False)
    assert seen == [True, True, False, False]


@pytest.mark.parametrize("plan", PLANS)
def test_a_training_step_is_the_masked_paths(make_pair, ids, plan):
    ids = ids[:2].to(DEVICE)
    positions = torch.cat([torch.arange(15), torch.arange(9)]).expand(2, -1).to(DEVICE)  # two documents a row
    found = []
    for model in both(make_pair, **plan):
        model.train()
        output = model(ids, position_ids=positions, labels=ids, use_cache=False, output_router_logits=True)
        output.loss.backward()
        found.append((output.logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}))
    (logits, grads), (sparse_logits, sparse_grads) = found
    torch.testing.assert_close(sparse_logits, logits, rtol=1e-5, atol=1e-5)
    for name, grad in grads.items():
        if grad is None:
            assert sparse_grads[name] is None
        else:
            assert distance(sparse_grads[name], grad.double()) < 1e-5, name


def test_mixed_precision_computes_in_its_dtype(make_pair, ids, monkeypatch):
    ids, seen, found = ids[:1].to(DEVICE), set(), []
    attend = head_sparse.head_sparse_attention
    monkeypatch.setattr(
        head_sparse, "head_sparse_attention", lambda *a: seen.update(x.dtype for x in a[:3]) or attend(*a)
    )
    masked, sparse = both(make_pair, **PLANS[1])
    for model, half in ((masked, False), (masked, True), (sparse, True)):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            logits = model.train()(ids, use_cache=False).logits
            logits.float().square().mean().backward()
        found.append((logits.detach().float(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()))
    assert seen == {torch.bfloat16}
    for exact, by_mask, by_lists in zip(*found, strict=True):
        assert distance(by_lists, exact.double()) < 1.5 * distance(by_mask, exact.double()) < 0.1


@pytest.mark.parametrize("plan", [PLANS[1], PLANS[4]])
def test_generation_with_left_padding_gives_the_masked_paths_tokens(make_pair, ids, plan):
    ids, mask = ids[:2].to(DEVICE), torch.ones_like(ids[:2]).to(DEVICE)
    mask[0, :7] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    masked, sparse = (model.generate(ids, **settings) for model in both(make_pair, **plan))
    assert torch.equal(masked, sparse)


def test_a_mask_without_padding_costs_nothing_and_changes_nothing(make_pair, ids, monkeypatch):
    ids = ids.to(DEVICE)
    masked, sparse = both(make_pair, **PLANS[1])
    seen = []
    attend = head_sparse.head_sparse_attention
    monkeypatch.setattr(head_sparse, "head_sparse_attention", lambda *a, **k: seen.append(a) or attend(*a, **k))
    # Positions that restart begin a document only where no mask is given.
    positions = torch.cat([torch.arange(15), torch.arange(9)]).expand(3, -1).to(DEVICE)
    with torch.no_grad():
        logits = [m(ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits for m in (masked, sparse)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    assert len(seen) == 2
    assert all(first is None and key_mask is None for *_, first, key_mask, _ in seen)


def test_what_it_cannot_do_is_said_in_a_line(make_pair, ids, monkeypatch):
    _, sparse = both(make_pair, **PLANS[0])
    ids = ids.to(DEVICE)
    with pytest.raises(ValueError, match=r"'moh_sparse' takes a mask of padding \[batch, keys\].*use 'sdpa'"):
        sparse(ids, attention_mask=torch.ones(3, 1, 24, 24, device=DEVICE, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"'moh_sparse'.* static caches"):
        sparse.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match=r"sparse_gate_gradient='none' must be one of exact, selected"):
        sparse.set_sparse_gate_gradient("none")
    for name, lacking in (("triton", "Triton"), ("interpret", "a CUDA device")):
        with monkeypatch.context() as patch:
            if name == "triton":
                patch.setattr(head_sparse, "triton", None)
            elif DEVICE == "cpu":
                patch.setattr(head_sparse.triton.knobs.runtime, "interpret", False)
            else:
                continue
            with pytest.raises(RuntimeError, match=rf"'moh_sparse' needs {lacking}.*'sdpa' and 'eager'"):
                sparse(ids)
