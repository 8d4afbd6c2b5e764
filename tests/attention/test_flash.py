"""What flash-attn-4 is given, by a stand-in that computes it plainly; and that its calls compile for Hopper."""

import math
import os
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import pytest
import torch

from moh_llm.attention import Call, flash
from moh_llm.attention.plan import group_table, plan_of
from tests.attention.naive import first_of, naive_attention, seen_of


class Lists(NamedTuple):
    """`BlockSparseTensorsTorch`'s fields, in their order."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None


def shown(query, key, lists, aux_tensors, causal, left, transposed=False):
    """Which keys `[B, H, N, S]` a call shows, of states `[B, N, H, D]`, by the rules of flash-attn-4."""
    entries, keys = query.shape[1], key.shape[1]
    place, entry = torch.arange(keys), torch.arange(entries)[:, None] + keys - entries
    if lists is None:
        seen = place <= entry if causal or left is not None else torch.ones(entries, keys, dtype=torch.bool)
        return seen & (place >= entry - left) if left is not None else seen
    rows, columns = lists.block_size if not transposed else lists.block_size[::-1]
    length, other = (keys, entries) if transposed else (entries, keys)
    found = []
    for count, listed in (lists[:2], lists[2:4]):
        assert count.dtype == listed.dtype == torch.int32 and count.shape == listed.shape[:3]
        assert listed.shape[2] == -(-length // rows) and listed.shape[3] <= -(-other // columns)
        flags = torch.zeros(*listed.shape[:3], -(-other // columns), dtype=torch.bool)
        flags.scatter_(-1, listed.long(), torch.arange(listed.shape[3]) < count[..., None])
        flags = flags.repeat_interleave(rows, 2)[:, :, :length].repeat_interleave(columns, 3)[..., :other]
        found.append(flags.transpose(2, 3) if transposed else flags)
    last, low, *sinks = (bound[..., None] for bound in aux_tensors)
    sees = place >= low
    if sinks:
        sees = sees | ((place >= sinks[0]) & (place < sinks[1]))
    assert not (found[0] & found[1]).any()
    return found[1] | (found[0] & sees & (place <= last))


def weights_of(query, key, seen, scale):
    """Scores' softmax `[B, H, N, S]` and its log-sum `[B, H, N]`."""
    shared = query.shape[2] // key.shape[2]
    scores = torch.einsum("bnhd,bshd->bhns", query, key.repeat_interleave(shared, 2)) * scale
    lse = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
    return (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp().masked_fill(~seen, 0), lse


def stand_in(arch: int) -> dict[str, types.ModuleType]:
    """Modules with flash-attn-4's functions, by its documentation."""

    def forward(
        q, k, v, softmax_scale, return_lse, out, causal=False, window_size_left=None, window_size_right=None,
        mask_mod=None, aux_tensors=None, block_sparse_tensors=None,
    ):  # fmt: skip
        assert return_lse and (window_size_left is None or window_size_right == 0)
        assert block_sparse_tensors is None or block_sparse_tensors.block_size[0] == (256 if arch >= 100 else 128)
        seen = shown(q, k, block_sparse_tensors, aux_tensors, causal, window_size_left)
        weights, lse = weights_of(q, k, seen, softmax_scale)
        out.copy_(torch.einsum("bhns,bshd->bnhd", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2)))
        return out, lse, None, None, None

    def backward(
        q, k, v, out, dout, lse, softmax_scale, dlse, deterministic, dq, dk, dv, causal=False, window_size_left=None,
        window_size_right=None, mask_mod=None, aux_tensors=None, block_sparse_tensors=None,
    ):  # fmt: skip
        assert not deterministic
        seen = shown(q, k, block_sparse_tensors, aux_tensors, causal, window_size_left, transposed=True)
        shared = q.shape[2] // k.shape[2]
        scores = torch.einsum("bnhd,bshd->bhns", q, k.repeat_interleave(shared, 2)) * softmax_scale
        weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp().masked_fill(~seen, 0)
        delta = (dout * out).sum(-1).transpose(1, 2) - (0 if dlse is None else dlse)
        change = torch.einsum("bnhd,bshd->bhns", dout, v.repeat_interleave(shared, 2)) - delta[..., None]
        change = weights * change * softmax_scale
        dq.copy_(torch.einsum("bhns,bshd->bnhd", change, k.repeat_interleave(shared, 2)))
        for own, given, by in ((dk, q, change), (dv, dout, weights)):
            whole = torch.einsum("bhns,bnhd->bshd", by, given)
            own.copy_(whole.unflatten(2, (-1, shared)).sum(3))
        return dq, dk, dv

    modules = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    interface, sparsity = types.ModuleType("interface"), types.ModuleType("block_sparsity")
    interface._flash_attn_fwd, interface._flash_attn_bwd, interface._get_device_arch = forward, backward, lambda: arch
    sparsity.BlockSparseTensorsTorch, sparsity.compute_dq_write_order = Lists, None
    modules["flash_attn.cute"].interface = interface
    masks = modules["moh_llm.attention.flash_masks"] = types.ModuleType("flash_masks")
    masks.is_seen = masks.is_seen_or_sink = None
    return modules | {"flash_attn.cute.interface": interface, "flash_attn.cute.block_sparsity": sparsity}


@pytest.fixture(params=[90, 100], ids=["Hopper", "Blackwell"])
def flash_attn(request, monkeypatch):
    for name, module in stand_in(request.param).items():
        monkeypatch.setitem(sys.modules, name, module)


def plain(query, key, value, seen):
    """Outputs `[B, H, N, D]` and log-sum-exp of states `[B, H, length, D]`, where `seen`."""
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    weights, lse = weights_of(query, key, seen, 0.3)
    return weights @ value.repeat_interleave(query.shape[2] // value.shape[1], 1), lse


def check_with_gradients(found, expected, states):
    """Outputs, log-sum-exp where there is one, and gradients of both."""
    torch.manual_seed(1)
    finite = expected[1] > -math.inf
    assert torch.equal(found[1] > -math.inf, finite)
    weights = torch.randn_like(expected[0]), torch.randn_like(expected[1][finite])
    gradients = []
    for out, lse in (found, expected):
        loss = (out * weights[0]).sum() + (lse[finite] * weights[1]).sum()
        gradients.append(torch.autograd.grad(loss, states))
    torch.testing.assert_close((found[0], found[1][finite]), (expected[0], expected[1][finite]))
    torch.testing.assert_close(gradients[0], gradients[1])


def random_states(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [20, 7])
def test_causal_calls(flash_attn, window, length):
    """Of T queries after a cache, too; key-value heads are shared."""
    query, key, value = states = random_states((2, 6, length, 8), (2, 2, 20, 8), (2, 2, 20, 8))
    place, own = torch.arange(20), torch.arange(20 - length, 20)[:, None]
    seen = (place <= own) & (place > own - (window or 20))
    found = flash.causal_attention(query, key, value, 0.3, window)
    check_with_gradients(found, plain(query, key, value, seen), states)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize(
    ("rows", "queries"),
    [([[300]], 300), ([[-30, 270], [130, 170]], 300), ([[100]], 100), ([[500]], 140), ([[500]], 500)],
    ids=str,
)
def test_sorted_calls(flash_attn, rows, queries, sinks):
    """The lists of a plan, cut or paired as the GPU wants them, show what the bounds say."""
    seen = seen_of(rows, queries, window=40, sinks=sinks, local_start=30)
    batch, keys = len(rows), sum(map(abs, rows[0]))
    torch.manual_seed(0)
    first = first_of(torch.rand(batch, queries, 4) < 0.3, seen)
    _, table = group_table((0, 1, 3), 2, torch.device("cpu"))
    plan = plan_of(first, seen, table, keys, gradients=True)
    query, key, value = states = random_states((*plan.last.shape, 8), (batch, 2, keys, 8), (batch, 2, keys, 8))
    place = torch.arange(keys)
    shows = place >= plan.low[..., None]
    if sinks:
        shows = shows | ((place >= plan.start[..., None]) & (place < plan.sink_end[..., None]))
    expected = plain(query, key, value, shows & (place <= plan.last[..., None]))
    check_with_gradients(flash.sorted_attention(query, key, value, plan, 0.3), expected, states)


def test_the_operation(flash_attn):
    """Heads that are always on, a routed one, one that is never on; sinks and the distant token."""
    seen = seen_of([[20], [20]], window=5, sinks=2)
    query, key, value, score, far = random_states((2, 4, 20, 8), (2, 2, 20, 8), (2, 2, 20, 8), (2, 20, 4), (4, 8))
    on = torch.rand(2, 20, 4) < torch.tensor([2, 0.5, 2, -1])
    given = query, key, value, first_of(on, seen), seen, 0.3, (score, far)
    expected = naive_attention(*given)
    torch.testing.assert_close(flash.flash_attention(Call(*given, kinds=((0, 2), (3,)))), expected)


def test_compiled_models_contain_the_operation(flash_attn):
    """Its shapes, strides and gradients are known without a call."""
    states = [state.detach().float().requires_grad_() for state in random_states((2, 4, 20, 8), *[(2, 2, 20, 8)] * 2)]
    torch.library.opcheck(torch.ops.moh_llm.flash.default, (*states, 0.3, 5, [], []))
    by_token = states[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.library.opcheck(torch.ops.moh_llm.flash.default, (by_token, *states[1:], 0.3, None, [], []))


SCRIPT = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from moh_llm.attention import Call, flash

def states(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")

size, kind = int(sys.argv[1]), sys.argv[2]
with FakeTensorMode():
    query, key, window, bounds, lists = states(1, 4, 512, size), states(1, 2, 256, size), None, [], []
    if kind == "sorted":
        query, key = states(1, 2, 512, size), states(1, 2, 256, size)
        bounds = [states(1, 2, 512, dtype=torch.int32) for _ in range(4)]
        for rows, columns in ((4, 2), (2, 4)):
            lists += [states(1, 2, *shape, dtype=torch.int32) for shape in 2 * ((rows,), (rows, columns))]
    if kind == "window":
        window = 128
    out, lse = flash.forward(query, key, key, 0.1, window, bounds, lists)
    assert out.shape == query.shape and lse.shape == query.shape[:3]
    gradients = flash.backward(out, lse, query, key, key, out, lse, 0.1, window, bounds, lists)
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("sorted", 64), ("sorted", 128), ("causal", 128), ("window", 128)])
def test_calls_compile_for_hopper(kind, size):
    """Forward and backward, in a process of its own: no GPU need be here, and tensors are fake."""
    try:
        version(flash.PACKAGE)
    except PackageNotFoundError:
        pytest.skip(f"needs {flash.PACKAGE}")
    environment = os.environ | {"FLASH_ATTENTION_ARCH": "sm_90a", "CUTE_DSL_ARCH": "sm_90a"}
    environment |= {"FLASH_ATTENTION_NUM_SMS": "132", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", SCRIPT, str(size), kind]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
