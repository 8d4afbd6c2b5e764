"""Causal, windowed and sorted attention by flash-attn-4 (extra `gpu`), on Hopper and Blackwell GPUs.

The package is imported at the first call. Calls are registered as PyTorch operators, so that compiled models can
contain them. Outputs and log-sum-exp both have gradients, so that parts of one softmax can be merged afterwards.

Shapes: B batch, T queries, S keys (S >= T; the last query sees the last key), H query heads, KV key-value heads, D head
size; G groups of heads, N entries, M and K blocks as in plan.py.
"""

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from .call import FLOAT16, Call
from .parts import Kernels, attention_of_parts, why_not_sorted
from .plan import BLOCK, Blocks, Plan, list_blocks

PACKAGE = "flash-attn-4"
HEAD_SIZES = (64, 128)
States = tuple[Tensor, Tensor, Tensor]


def why_not(call: Call) -> str | None:
    """Why `flash_attention` does not take this call; None if it does."""
    return why_not_sorted(call) or lack(call.query.device, call.query.dtype, call.query.shape[-1])


def lack(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """Why flash-attn-4 does not run heads of this size on this device; None if it does."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{PACKAGE} runs on NVIDIA GPUs only"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10, 11):
        return f"{PACKAGE} needs Hopper or Blackwell; this GPU has compute capability {major}.{minor}"
    if dtype not in FLOAT16:
        return f"{PACKAGE} takes bfloat16 and float16, not {str(dtype)[6:]}"
    if size not in HEAD_SIZES:
        return f"{PACKAGE} is used for head sizes 64 and 128, not {size}"
    if major == 9 and torch.are_deterministic_algorithms_enabled():
        return f"{PACKAGE} has no deterministic backward pass for sorted queries on Hopper"
    return None if _is_installed() else f"{PACKAGE} is not installed (pip install 'moh-llm[gpu]')"


@functools.cache
def _is_installed() -> bool:
    try:
        return bool(version(PACKAGE))
    except PackageNotFoundError:
        return False


def flash_attention(call: Call) -> Tensor:
    """`interval_attention` with flash-attn-4 for sorted queries, `[B, T, H, D]`."""
    return attention_of_parts(call, Kernels(sorted_attention, causal_attention, causal_attention))


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of each query to all keys up to its own, or to the last `window` of them.

    `query` is `[B, H, T, D]`, `key` and `value` are `[B, KV, S, D]`. Returns outputs `[B, H, T, D]` and their
    log-sum-exp `[B, H, T]`, float32.
    """
    return torch.ops.moh_llm.flash(query, key, value, scaling, window, [], [])


def sorted_attention(query: Tensor, key: Tensor, value: Tensor, plan: Plan, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of sorted queries; same contract as `flex.sorted_attention`, with a log-sum-exp in float32."""
    bounds = [bound for bound in (plan.last, plan.low, plan.start, plan.sink_end) if bound is not None]
    return torch.ops.moh_llm.flash(query, key, value, scaling, None, bounds, [*plan.keys, *(plan.queries or ())])


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    bounds: list[Tensor],
    lists: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Forward pass of one call: outputs and log-sum-exp.

    For sorted queries, `bounds` holds last, low and, with sinks, start and sink_end; `lists` holds the fields of
    `plan.keys`, followed by those of `plan.queries`. The call is causal if both are empty.
    """
    from flash_attn.cute import interface

    by_token = [states.transpose(1, 2) for states in (query, key, value)]
    how = _how(window, bounds)
    if bounds:
        how["block_sparse_tensors"] = _lists_of_keys(lists, query.shape[2], key.shape[2])
    out = torch.empty_like(by_token[0])
    _, lse, *_ = interface._flash_attn_fwd(*by_token, softmax_scale=scaling, return_lse=True, out=out, **how)
    return out.transpose(1, 2), lse


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scaling: float,
    window: int | None,
    bounds: list[Tensor],
    lists: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    If other parts were merged into the softmax, pass `grad`, `out` and `lse` of the merged result, without `grad_lse`:
    the gradients are then this part's share.
    """
    from flash_attn.cute import interface

    by_token = [tensor.transpose(1, 2) for tensor in (query, key, value, out, grad)]
    how = _how(window, bounds)
    if bounds:
        how["block_sparse_tensors"] = _lists_of_queries(lists, query.shape[2], key.shape[2])
    gradients = [torch.empty_like(states) for states in by_token[:3]]
    interface._flash_attn_bwd(
        *by_token,
        lse,
        softmax_scale=scaling,
        dlse=grad_lse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        **how,
    )
    return tuple(tensor.transpose(1, 2) for tensor in gradients)


def _how(window: int | None, bounds: list[Tensor]) -> dict[str, Any]:
    """Arguments that select the visible keys, without the lists of blocks."""
    if bounds:
        from . import flash_masks

        mask = flash_masks.is_seen_or_sink if len(bounds) > 2 else flash_masks.is_seen
        return {"mask_mod": mask, "aux_tensors": bounds}
    return {"causal": True} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _lists_of_keys(lists: list[Tensor], entries: int, keys: int) -> Any:
    """The blocks of keys to read. Blackwell computes two blocks of entries at once, which share one list."""
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    blocks, size = _cut(Blocks(*lists[:4]), entries, keys), BLOCK
    if interface._get_device_arch() >= 100:
        blocks, size = _paired(blocks), 2 * BLOCK
    return BlockSparseTensorsTorch(*blocks, block_size=(size, BLOCK))


def _lists_of_queries(lists: list[Tensor], entries: int, keys: int) -> Any:
    """The blocks of entries that read each block of keys, and the order of writes if gradients are deterministic."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, compute_dq_write_order

    if len(lists) < 8:
        raise RuntimeError("the plan has no lists for gradients")
    blocks, order = _cut(Blocks(*lists[4:]), keys, entries), {}
    if torch.are_deterministic_algorithms_enabled():
        of_keys = _cut(Blocks(*lists[:4]), entries, keys)
        partial, full = compute_dq_write_order(*of_keys, *blocks)
        order = {"dq_write_order": partial, "dq_write_order_full": full, "spt": False}
    return BlockSparseTensorsTorch(*blocks, block_size=(BLOCK, BLOCK), **order)


def _cut(blocks: Blocks, rows: int, columns: int) -> Blocks:
    """Cut the lists to the blocks that `rows` and `columns` fill, since a plan has at least two of each."""
    rows, columns = -(-rows // BLOCK), -(-columns // BLOCK)
    if blocks.partial.shape[2:] == (rows, columns):
        return blocks
    partial, full = (listed[:, :, :rows, :columns] for listed in (blocks.partial, blocks.full))
    return Blocks(blocks.partial_count[:, :, :rows], partial, blocks.full_count[:, :, :rows], full)


def _paired(blocks: Blocks) -> Blocks:
    """Lists for pairs of rows: partial if either row reads the block, full if both rows read all of it."""
    columns = torch.arange(blocks.full.shape[-1], device=blocks.full.device)

    def flags(count: Tensor, listed: Tensor) -> Tensor:
        """`[B, G, M / 2, 2, K]`; an odd last row is paired with itself."""
        found = torch.zeros_like(listed, dtype=torch.bool).scatter_(-1, listed.long(), columns < count.unsqueeze(-1))
        return torch.cat([found, found[:, :, -1:]], dim=2)[:, :, : -(-found.shape[2] // 2) * 2].unflatten(2, (-1, 2))

    partial, full = flags(blocks.partial_count, blocks.partial), flags(blocks.full_count, blocks.full)
    both = full.all(3)
    return list_blocks((partial | full).any(3) & ~both, both)


def _fake_forward(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return torch.empty_like(query.transpose(1, 2)).transpose(1, 2), lse


def _fake_backward(grad: Tensor, grad_lse: Tensor | None, *args: Any) -> States:
    return tuple(torch.empty_like(states.transpose(1, 2)).transpose(1, 2) for states in args[:3])


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, scaling, window, bounds, lists = inputs
    ctx.save_for_backward(query, key, value, *output, *bounds, *lists)
    ctx.how = scaling, window, len(bounds), len(lists)


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple:
    states, rest = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    scaling, window, bounds, lists = ctx.how
    gradients = torch.ops.moh_llm.flash_backward(grad, grad_lse, *states, scaling, window, rest[:bounds], rest[bounds:])
    return *gradients, None, None, [None] * bounds, [None] * lists


# Not `custom_op`: its calls take longer outside CUDA graphs, because it also supports mutated inputs.
for _name, _function, _fake in (
    ("moh_llm::flash", forward, _fake_forward),
    ("moh_llm::flash_backward", backward, _fake_backward),
):
    _schema = torch.library.infer_schema(_function, mutates_args=())
    torch.library.define(_name, _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_name, "default", _function)
    torch.library.register_fake(_name, _fake)
torch.library.register_autograd("moh_llm::flash", _gradients, setup_context=_save)
