"""The Triton kernels of `decode`: attention of one new token over parts of a cache, and these parts put together.

Shapes: H query heads, G heads of keys and values, D head size; a program computes `BR` heads over `BN` keys at once, in
tiles of width `BD`, which are powers of two. Scores are kept in base 2: `scale` is scaling * log2(e).
"""

import math

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = part_kernel = join_kernel = None

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
