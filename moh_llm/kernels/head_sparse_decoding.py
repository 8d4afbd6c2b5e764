"""Attention of one new token over a cache, which reads only keys and values that a selected head needs.

Shapes: B batch, S keys, H query heads, G heads of keys and values, D head size, P parts of the cache.

Heads that share keys and values are one program, which ends at once where none of them is on. The
cache is cut into parts that are read at the same time and then put together (as in FlashDecoding):
part p gives a head its weighted mean o_p and log-sum l_p; the head is sum_p 2^(l_p - l) o_p.
"""

import functools
import math

import torch

from moh_llm.kernels.head_sparse_kernels import dot, keys_at, tl, triton

BLOCK = 64  # keys that a program reads at once
SHORTEST_PART = 4 * BLOCK
MOST_PARTS = 64

if triton is not None:

    @triton.jit(do_not_specialize=["S", "part"])
    def part_kernel(
        Q, K, V, Gate, KeyMask, Outs, Lses,
        q_b, q_h, k_b, k_g, k_s, v_b, v_g, v_s, S, part, scale,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
        HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        p, bg = tl.program_id(0), tl.program_id(1)
        parts = tl.num_programs(0)
        b, g = bg // G, bg % G
        r, d = tl.arange(0, BR), tl.arange(0, BD)
        h = g * (H // G) + r
        on = (r < H // G) & (tl.load(Gate + b * H + h, mask=r < H // G, other=0.0) != 0)
        if tl.max(on.to(tl.int32)) > 0:
            inside = on[:, None] & (d[None, :] < D)
            q = tl.load(Q + b.to(tl.int64) * q_b + h[:, None] * q_h + d[None, :], mask=inside, other=0.0)
            keys, values = K + b.to(tl.int64) * k_b + g * k_g, V + b.to(tl.int64) * v_b + g * v_g
            m = tl.full([BR], -float("inf"), tl.float32)
            total, acc = tl.zeros([BR], tl.float32), tl.zeros([BR, BD], tl.float32)
            for start in range(p * part, tl.minimum(p * part + part, S), BN):
                n = start + tl.arange(0, BN)
                k, v = keys_at(keys, n, k_s, d, S, D, True), keys_at(values, n, v_s, d, S, D, True)
                scores = dot(q, tl.trans(k), PRECISION) * scale
                keep = n < S
                if HAS_MASK:
                    keep &= tl.load(KeyMask + b.to(tl.int64) * S + n, mask=n < S, other=0) != 0
                scores = tl.where(keep[None, :], scores, -float("inf"))
                new = tl.maximum(m, tl.max(scores, 1))
                safe = tl.where(new == -float("inf"), 0.0, new)
                weights, shrink = tl.exp2(scores - safe[:, None]), tl.exp2(m - safe)
                total = total * shrink + tl.sum(weights, 1)
                acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v, PRECISION)
                m = new
            seen = total > 0
            acc = acc / tl.where(seen, total, 1.0)[:, None]
            lse = tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), -float("inf"))
            place = (b * H + h).to(tl.int64) * parts + p
            tl.store(Outs + place[:, None] * D + d[None, :], acc, mask=inside)
            tl.store(Lses + place, lse, mask=on)

    @triton.jit
    def join_kernel(Gate, Outs, Lses, Out, D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr):
        bh = tl.program_id(0)
        p, d = tl.arange(0, P), tl.arange(0, BD)
        gate = tl.load(Gate + bh)
        out = tl.zeros([BD], tl.float32)
        if gate != 0:  # else its parts were never written
            lse = tl.load(Lses + bh.to(tl.int64) * P + p)
            top = tl.max(lse, 0)
            weights = tl.exp2(lse - tl.where(top == -float("inf"), 0.0, top))
            total = tl.sum(weights, 0)
            place = (bh.to(tl.int64) * P + p)[:, None] * D + d[None, :]
            outs = tl.load(Outs + place, mask=d[None, :] < D, other=0.0)
            out = tl.sum(outs * weights[:, None], 0) / tl.where(total > 0, total, 1.0) * gate
        tl.store(Out + bh.to(tl.int64) * D + d, out.to(Out.dtype.element_ty), mask=d < D)


@functools.cache
def _programs_wanted(device: torch.device) -> int:
    """How many programs keep a device busy, some of which end at once."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def count_parts(groups: int, keys: int, device: torch.device) -> int:
    """Into how many parts a cache of `keys` is cut, given `groups` programs per part: a power of two."""
    useful = max(1, keys // SHORTEST_PART)
    wanted = max(1, _programs_wanted(device) // groups)
    return min(MOST_PARTS, 1 << (useful.bit_length() - 1), triton.next_power_of_2(wanted))


def head_sparse_decoding(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    gate: torch.Tensor,
    scaling: float,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gated head outputs g_h H_h `[B, 1, H, D]` of one new token; it has no gradient.

    Of heads that share keys and values none may be on: then their part of the cache is not read.

    Args:
        queries: `[B, H, 1, D]`, after rotary embedding.
        keys, values: `[B, G, S, D]`, the new token's among them.
        gate: `[B, 1, H]`, zero where a head is off.
        scaling: of the scores before the softmax.
        key_mask: `[B, S]`, zero where a key is padding.
    """
    (batch, heads, _, size), (groups, length) = queries.shape, keys.shape[1:3]
    queries, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries, keys, values))
    gate = gate.float().contiguous()
    parts = count_parts(batch * groups, length, queries.device)
    part = triton.cdiv(triton.cdiv(length, parts), BLOCK) * BLOCK
    outs = torch.empty(batch, heads, parts, size, device=queries.device, dtype=torch.float32)
    lses = torch.empty(batch, heads, parts, device=queries.device, dtype=torch.float32)
    out = torch.empty(batch, 1, heads, size, device=queries.device, dtype=queries.dtype)
    sizes = {"D": size, "BD": max(16, triton.next_power_of_2(size))}
    precision = "ieee" if queries.dtype == torch.float32 else "tf32"  # only float32 has the choice
    part_kernel[parts, batch * groups](
        *(queries, keys, values, gate, gate if key_mask is None else key_mask, outs, lses),
        *(*queries.stride()[:2], *keys.stride()[:3], *values.stride()[:3]),
        *(length, part, scaling * math.log2(math.e)),
        H=heads,
        G=groups,
        BR=max(16, triton.next_power_of_2(heads // groups)),  # the least that a product takes
        BN=BLOCK if queries.dtype != torch.float32 else 32,
        HAS_MASK=key_mask is not None,
        PRECISION="interpreted" if triton.knobs.runtime.interpret else precision,
        num_warps=4,
        num_stages=3,
        **sizes,
    )
    join_kernel[(batch * heads,)](gate, outs, lses, out, P=parts, num_warps=1, **sizes)
    return out
