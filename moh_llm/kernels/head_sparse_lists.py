"""Which positions selected each head, as lists that the kernels of `head_sparse` walk.

Shapes: B batch, T positions, H query heads. One launch that nothing waits for: the host never learns how long the
lists are, so they may stand in a CUDA graph.
"""

import torch

from moh_llm.kernels.head_sparse_kernels import tl, triton

Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

if triton is not None:

    @triton.jit(do_not_specialize=["T"])
    def list_kernel(Gate, Rows, Counts, Before, T, H: tl.constexpr, BT: tl.constexpr):
        bh = tl.program_id(0)
        b, h = bh // H, bh % H
        of_head = bh.to(tl.int64) * T
        count = tl.load(Counts + bh)  # 0
        for start in range(0, T, BT):
            t = start + tl.arange(0, BT)
            there = t < T
            gate = tl.load(Gate + (b.to(tl.int64) * T + t) * H + h, mask=there, other=0.0)
            selected = (gate != 0).to(tl.int32)
            before = count + tl.cumsum(selected, 0) - selected
            tl.store(Before + of_head + t, before, mask=there)
            tl.store(Rows + of_head + before, t, mask=selected != 0)
            count += tl.sum(selected, 0)
        tl.store(Counts + bh, count)


def selected_positions(gate: torch.Tensor) -> Lists:
    """Lists of the positions that selected each head, made on the device without waiting for it.

    Args:
        gate: `[B, T, H]`, zero where a head is off.

    Returns:
        `rows` int32 `[B, H, T]`, each list in order, then unused entries; `counts` int32 `[B, H]`; and
        `before` int32 `[B, H, T]`, how many entries of the list stand before a position.
    """
    batch, length, heads = gate.shape
    rows, before = torch.empty(2, batch, heads, length, device=gate.device, dtype=torch.int32)
    counts = torch.zeros(batch, heads, device=gate.device, dtype=torch.int32)
    list_kernel[(batch * heads,)](gate.contiguous(), rows, counts, before, length, H=heads, BT=2048, num_warps=8)
    return rows, counts, before


def all_positions(batch: int, length: int, heads: int, device: torch.device) -> Lists:
    """The lists of heads that all positions selected."""
    rows = torch.arange(length, device=device, dtype=torch.int32).expand(batch, heads, -1).contiguous()
    return rows, torch.full((batch, heads), length, device=device, dtype=torch.int32), rows


__all__ = ["Lists", "all_positions", "selected_positions"]
