"""Interval attention of one new token per row over a cache on a GPU: one operation of two launches, without gradients.

Shapes: B batch, S keys (of the cache, static ones with room behind the last), H query heads, KV key-value heads, D head
size, P parts of what a row reads.

Heads that share keys and values are read by the same programs. Where one of them is on, these read its document;
where all are off, only the sinks and the longest window. What is read is cut into blocks, and these into parts that are
read at the same time and then put together (as in FlashDecoding): part p gives a head its weighted mean o_p and the
log-sum l_p, and the head is sum_p 2^(l_p - l) o_p, the distant token being one more part.

The host reads no tensor: how many programs there are follows from shapes, what each reads from tensors on the device.
So the operation can be a part of a CUDA graph, and with a static cache the same graph serves every length.

A program of the Triton kernels computes `BR` heads over `BN` keys at once, in tiles of width `BD`, which are powers of
two. Scores are kept in base 2: `scale` is scaling * log2(e).
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .call import Call

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = part_kernel = join_kernel = None

SHORTEST_PART = 256  # keys
MOST_PARTS = 64
LARGEST_HEAD = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if triton is not None:
    LOG2_E = tl.constexpr(math.log2(math.e))

    @triton.jit
    def dot(a, b, PRECISION: tl.constexpr):
        """A product of two tiles, added up in float32."""
        if PRECISION == "interpreted":  # whose bfloat16 are bit patterns that it would multiply as integers
            return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        return tl.dot(a, b, input_precision=PRECISION)

    @triton.jit
    def keys_at(X, n, stride, d, shown, D: tl.constexpr):
        """The vectors of keys or values `n` as the rows of a tile, zero where none is `shown`."""
        where = X + n[:, None].to(tl.int64) * stride + d[None, :]
        if d.shape[0] == D:
            return tl.load(where, mask=shown[:, None], other=0.0)
        return tl.load(where, mask=shown[:, None] & (d[None, :] < D), other=0.0)

    @triton.jit(do_not_specialize=["count"])  # else lengths of masks are compiled anew
    def part_kernel(
        Q, K, V, First, Start, SinkEnd, Last, Visible, Outs, Lses,
        q_b, q_h, k_b, k_g, k_s, v_b, v_g, v_s, first_b, first_h, start_b, sink_end_b, last_b, visible_b, count, scale,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
        LEAST: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Mean and log-sum of one part for the heads of one of `G` groups; no mean is written where it is empty."""
        bg, p, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        b, g = (bg // G).to(tl.int64), (bg % G).to(tl.int64)
        r, d = tl.arange(0, BR), tl.arange(0, BD)
        h = g * (H // G) + r
        there = r < H // G
        last = tl.load(Last + b * last_b).to(tl.int32)
        start = tl.load(Start + b * start_b).to(tl.int32)
        sink_end = tl.load(SinkEnd + b * sink_end_b).to(tl.int32)
        first = tl.load(First + b * first_b + h * first_h, mask=there, other=0).to(tl.int32)
        first = tl.where(there, first, last + 1)
        low = tl.min(first, 0)
        # Blocks that are read: those with sinks, then those from `low` on, none of them twice.
        sink_block = start // BN
        sinks = tl.where(sink_end > start, tl.cdiv(sink_end, BN) - sink_block, 0)
        block = tl.maximum(low // BN, tl.where(sinks > 0, sink_block + sinks, 0))
        blocks = sinks + tl.where(low <= last, tl.maximum(tl.cdiv(last + 1, BN) - block, 0), 0)
        each = tl.maximum(tl.cdiv(blocks, parts), LEAST)
        place = (b * H + h) * parts + p
        lse = tl.full([BR], -float("inf"), tl.float32)
        if p * each < blocks:
            inside = there[:, None] & (d[None, :] < D)
            q = tl.load(Q + b * q_b + h[:, None] * q_h + d[None, :], mask=inside, other=0.0)
            keys, values = K + b * k_b + g * k_g, V + b * v_b + g * v_g
            m = tl.full([BR], -float("inf"), tl.float32)
            total, acc = tl.zeros([BR], tl.float32), tl.zeros([BR, BD], tl.float32)
            for i in range(p * each, tl.minimum(p * each + each, blocks)):
                n = tl.where(i < sinks, sink_block + i, block + i - sinks) * BN + tl.arange(0, BN)
                shown = (n >= start) & (n <= last)
                k, v = keys_at(keys, n, k_s, d, shown, D), keys_at(values, n, v_s, d, shown, D)
                scores = dot(q, tl.trans(k), PRECISION) * scale
                keep = shown[None, :] & ((n[None, :] >= first[:, None]) | (n < sink_end)[None, :])
                if HAS_MASK:
                    keep &= (tl.load(Visible + b * visible_b + n, mask=n < count, other=0) != 0)[None, :]
                scores = tl.where(keep, scores, -float("inf"))
                new = tl.maximum(m, tl.max(scores, 1))
                safe = tl.where(new == -float("inf"), 0.0, new)  # a head may see nothing yet
                weights, shrink = tl.exp2(scores - safe[:, None]), tl.exp2(m - safe)
                total = total * shrink + tl.sum(weights, 1)
                acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v, PRECISION)
                m = new
            seen = total > 0
            acc = acc / tl.where(seen, total, 1.0)[:, None]
            lse = tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), -float("inf"))
            tl.store(Outs + place[:, None] * D + d[None, :], acc, mask=inside)
        tl.store(Lses + place, lse, mask=there)

    @triton.jit
    def join_kernel(
        First, Start, Hidden, Score, Distant, Outs, Lses, Out,
        first_b, first_h, start_b, hidden_b, score_b, score_h,
        H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, HAS_DISTANT: tl.constexpr,
    ):  # fmt: skip
        """One head's output from its parts and, where it is off and does not see some key, the distant token."""
        bh = tl.program_id(0).to(tl.int64)
        b, h = bh // H, bh % H
        p, d = tl.arange(0, P), tl.arange(0, BD)
        lse = tl.load(Lses + bh * P + p)
        top = tl.max(lse, 0)
        if HAS_DISTANT:
            hidden = tl.load(Hidden + b * hidden_b)
            is_off = tl.load(First + b * first_b + h * first_h) > tl.load(Start + b * start_b)
            far = tl.load(Score + b * score_b + h * score_h).to(tl.float32) * LOG2_E
            far += tl.log2(tl.maximum(hidden, 1).to(tl.float32))
            far = tl.where(is_off & (hidden > 0), far, -float("inf"))
            top = tl.maximum(top, far)
        top = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2(lse - top)
        total = tl.sum(weights, 0)
        written = (lse > -float("inf"))[:, None] & (d[None, :] < D)
        outs = tl.load(Outs + (bh * P + p)[:, None] * D + d[None, :], mask=written, other=0.0)
        out = tl.sum(outs * weights[:, None], 0)
        if HAS_DISTANT:
            weight = tl.exp2(far - top)
            total += weight
            out += weight * tl.load(Distant + h * D + d, mask=d < D, other=0.0).to(tl.float32)
        out = out / tl.where(total > 0, total, 1.0)
        tl.store(Out + bh * D + d, out.to(Out.dtype.element_ty), mask=d < D)


@functools.cache
def _programs_wanted(device: torch.device) -> int:
    """How many programs keep a device busy, some of which end at once."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def count_parts(groups: int, keys: int, device: torch.device) -> int:
    """Into how many parts at most a cache of `keys` is cut, given `groups` programs per part: a power of two."""
    useful = max(1, keys // SHORTEST_PART)
    wanted = max(1, _programs_wanted(device) // groups)
    return min(MOST_PARTS, 1 << (useful.bit_length() - 1), triton.next_power_of_2(wanted))


def tiles(shared: int, size: int, dtype: torch.dtype) -> dict[str, int]:
    """What a program computes at once where `shared` heads of `size` share keys, and how it is compiled.

    Keys and values of one block take 32 kB at most, so that the next blocks fit into the shared memory of any GPU.
    """
    rows, width = max(16, triton.next_power_of_2(shared)), max(16, triton.next_power_of_2(size))  # 16: for a product
    block = min(64, (16 << 10) // (width * dtype.itemsize))
    is_wide = rows * width > 4096  # too much for the registers of 4 warps
    tile = {"BR": rows, "BD": width, "BN": block, "LEAST": SHORTEST_PART // block}
    return tile | {"num_warps": 8 if is_wide else 4, "num_stages": 2 if is_wide else 3}


def _step(x: Tensor, dim: int) -> int:
    """How far apart neighbours of a dimension are, which are the same one where its length is 1."""
    return x.stride(dim) if x.shape[dim] > 1 else 0


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    start: Tensor,
    sink_end: Tensor,
    last: Tensor,
    hidden: Tensor,
    scaling: float,
    score: Tensor | None = None,
    distant: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Head outputs `[B, 1, H, D]` of one new token per row; zeros where a head sees nothing.

    A head sees keys s of start <= s <= last with s >= first or s < sink_end. Keys outside of that are not read, but for
    those that share a block, and where another head of the group sees them.

    Args:
        query: `[B, H, 1, D]`, after rotary embedding.
        key: `[B, KV, S, D]`, the new token's among them, of any strides; so is `value`.
        first: `[B, 1, H]`; `start` where the head is on, later where it is off.
        start: `[B or 1, 1, 1]`; so are `sink_end`, `last` and `hidden`.
        score: of the distant token, `[B, 1, H]`, scaled; None: there is none. It counts `hidden` times.
        distant: its values, `[H, D]`.
        visible: which of these keys a mask shows, bool `[B, S]`, those behind its end not; None: all.
    """
    (batch, heads, _, size), (groups, length) = query.shape, key.shape[1:3]
    mask = first if visible is None else visible.view(torch.uint8)  # which is not read where there is none
    query, key, value, mask = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, mask))
    has_distant = score is not None and distant is not None
    score, distant = (score, distant.contiguous()) if has_distant else (first, query)  # which are not read then
    parts = count_parts(batch * groups, length, query.device)
    outs = torch.empty(batch, heads, parts, size, device=query.device, dtype=torch.float32)
    lses = torch.empty(batch, heads, parts, device=query.device, dtype=torch.float32)
    out = torch.empty(batch, 1, heads, size, device=query.device, dtype=query.dtype)
    of_start, of_sink_end, of_last, of_hidden = (_step(x, 0) for x in (start, sink_end, last, hidden))
    of_first, of_score = ((_step(x, 0), _step(x, 2)) for x in (first, score))
    tile = tiles(heads // groups, size, query.dtype)
    precision = "ieee" if query.dtype == torch.float32 else "tf32"  # only float32 has the choice
    with torch.cuda.device_of(query):
        part_kernel[batch * groups, parts](
            *(query, key, value, first, start, sink_end, last, mask, outs, lses),
            *(*query.stride()[:2], *key.stride()[:3], *value.stride()[:3]),
            *(*of_first, of_start, of_sink_end, of_last, _step(mask, 0), mask.shape[-1], scaling * math.log2(math.e)),
            H=heads,
            G=groups,
            D=size,
            HAS_MASK=visible is not None,
            PRECISION="interpreted" if triton.knobs.runtime.interpret else precision,
            **tile,
        )
        join_kernel[(batch * heads,)](
            *(first, start, hidden, score, distant, outs, lses, out),
            *(*of_first, of_start, of_hidden, *of_score),
            H=heads,
            D=size,
            BD=tile["BD"],
            P=parts,
            HAS_DISTANT=has_distant,
            num_warps=4,
        )
    return out


# Not `custom_op`, whose calls take 30 us longer outside of graphs: it also prepares gradients and changed inputs.
torch.library.define(
    "moh_llm::decode",
    torch.library.infer_schema(launch, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),  # any strides, so that a compiler copies no cache
)
torch.library.impl("moh_llm::decode", "default", launch)
decode = torch.ops.moh_llm.decode.default


@torch.library.register_fake("moh_llm::decode")
def _(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    batch, heads, length, size = query.shape
    return query.new_empty(batch, length, heads, size)


def decode_attention(call: Call) -> Tensor:
    """`interval_attention` of one new token per row, `[B, 1, H, D]`.

    Raises:
        RuntimeError: a gradient would be lost.
    """
    if call.wants_gradients:
        raise RuntimeError("moh_llm::decode has no gradients; call it under torch.no_grad()")
    query, key, value, first, seen, scaling, distant, *_ = call
    score, values = distant if distant is not None else (None, None)
    bounds = (seen.start, seen.sink_end, seen.last, seen.hidden)
    return decode(query, key, value, first, *bounds, scaling, score, values, seen.visible)


def why_not(call: Call) -> str | None:
    """Why `decode_attention` does not take this call; None if it does."""
    query, seen = call.query, call.seen
    if triton is None:
        return "Triton is not installed"
    if not query.is_cuda:
        return "the tensors are not on a GPU"
    if query.shape[2] != 1:
        return "there is more than one new token"
    if query.dtype not in DTYPES or not call.is_one_dtype:
        return f"queries are {query.dtype}, the cache is {call.key.dtype}"
    if query.shape[3] > LARGEST_HEAD:
        return f"heads are larger than {LARGEST_HEAD}"
    if seen.visible is not None and (seen.visible.dim() != 2 or seen.visible.dtype != torch.bool):
        return "a mask adds to scores, or differs between heads"
    if max(x.shape[-1] for x in (seen.start, seen.sink_end, seen.last, seen.hidden)) > 1:
        return "what is seen differs between heads"
    return "it has no gradients" if call.wants_gradients else None
