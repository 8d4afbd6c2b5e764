"""The Triton kernels of `head_sparse_moh`: attention of the queries that are listed for each head, and its gradients.

Shapes: B batch, T queries, S keys, H query heads, G heads of keys and values, D head size.

Lists are per batch row and head: `Rows` `[B, H, T]` holds the positions in order, `Counts` `[B, H]`
how many there are, `Before` `[B, H, T]` how many stand before a position. A tile is `BM` entries of
a list against blocks of `BN` keys. Scores are kept in base 2: `scale` is scaling * log2(e).
"""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = forward_kernel = query_gradient_kernel = key_gradient_kernel = None


if triton is not None:

    @triton.jit
    def _dot(a, b, PRECISION: tl.constexpr):
        """A product of two tiles, added up in float32."""
        if PRECISION == "interpreted":  # whose bfloat16 are bit patterns that it would multiply as integers
            return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        return tl.dot(a, b, input_precision=PRECISION)

    @triton.jit
    def _visible(n, last, first, key_mask, S, HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr):
        """Which keys `n` `[N]` queries see that stand at `last` `[M]`."""
        keep = (n[None, :] <= last[:, None]) & (n[None, :] < S)
        if HAS_FIRST:
            keep &= n[None, :] >= first[:, None]
        if HAS_MASK:
            keep &= tl.load(key_mask + n, mask=n < S, other=0)[None, :] != 0
        return keep

    @triton.jit
    def _listed(Rows, First, b, bh, i, count, T, S, HAS_FIRST: tl.constexpr):
        """Entries `i` of a list: which there are, their positions, and the last and the first key that they see."""
        on = i < count
        rows = tl.load(Rows + bh.to(tl.int64) * T + i, mask=on, other=0)
        last = tl.where(on, rows + (S - T), -1)
        first = last * 0
        if HAS_FIRST:
            first = tl.load(First + b.to(tl.int64) * T + rows, mask=on, other=S)
        return on, rows, last, first

    @triton.jit
    def _vectors(X, index, stride, d, there):
        """The vectors of `X` at `index`, as the rows of a tile."""
        return tl.load(X + index[:, None].to(tl.int64) * stride + d[None, :], mask=there, other=0.0)

    @triton.jit
    def forward_kernel(
        Q, K, V, Rows, Counts, First, KeyMask, Out, Lse,
        q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, o_b, o_h, o_t,
        T, S, scale,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        # Tiles with the most keys first, so that the last to finish are short.
        tile, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
        b, h = bh // H, bh % H
        g = h // (H // G)
        count = tl.load(Counts + bh)
        if tile * BM < count:
            i, d = tile * BM + tl.arange(0, BM), tl.arange(0, BD)
            on, rows, last, first = _listed(Rows, First, b, bh, i, count, T, S, HAS_FIRST)
            inside = on[:, None] & (d[None, :] < D)
            q = _vectors(Q + b.to(tl.int64) * q_b + h * q_h, rows, q_t, d, inside)
            begin, end = tl.min(first) // BN * BN, tl.max(last) + 1
            m = tl.full([BM], -float("inf"), tl.float32)
            total = tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, BD], tl.float32)
            keys, values = K + b.to(tl.int64) * k_b + g * k_g, V + b.to(tl.int64) * v_b + g * v_g
            for start in range(begin, end, BN):
                n = start + tl.arange(0, BN)
                there = (n[:, None] < S) & (d[None, :] < D)
                k, v = _vectors(keys, n, k_s, d, there), _vectors(values, n, v_s, d, there)
                scores = _dot(q, tl.trans(k), PRECISION) * scale
                keep = _visible(n, last, first, KeyMask + b.to(tl.int64) * S, S, HAS_FIRST, HAS_MASK)
                scores = tl.where(keep, scores, -float("inf"))
                new = tl.maximum(m, tl.max(scores, 1))
                # A row that has seen no key yet keeps -inf; 0 in its place avoids inf - inf.
                safe = tl.where(new == -float("inf"), 0.0, new)
                weights = tl.exp2(scores - safe[:, None])
                shrink = tl.exp2(m - safe)
                total = total * shrink + tl.sum(weights, 1)
                acc = acc * shrink[:, None] + _dot(weights.to(v.dtype), v, PRECISION)
                m = new
            seen = total > 0
            acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
            place = Out + b.to(tl.int64) * o_b + h * o_h + rows[:, None].to(tl.int64) * o_t + d[None, :]
            tl.store(place, acc.to(Out.dtype.element_ty), mask=inside)
            lse = tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), float("inf"))
            tl.store(Lse + bh.to(tl.int64) * T + rows, lse, mask=on)

    @triton.jit
    def query_gradient_kernel(
        Q, K, V, Rows, Counts, First, KeyMask, Out, Lse, DOut, DQ, Delta,
        q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, o_b, o_h, o_t,
        T, S, scale, scaling,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        tile, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
        b, h = bh // H, bh % H
        g = h // (H // G)
        count = tl.load(Counts + bh)
        if tile * BM < count:
            i, d = tile * BM + tl.arange(0, BM), tl.arange(0, BD)
            on, rows, last, first = _listed(Rows, First, b, bh, i, count, T, S, HAS_FIRST)
            inside = on[:, None] & (d[None, :] < D)
            q = _vectors(Q + b.to(tl.int64) * q_b + h * q_h, rows, q_t, d, inside)
            place = b.to(tl.int64) * o_b + h * o_h + rows[:, None].to(tl.int64) * o_t + d[None, :]
            do = tl.load(DOut + place, mask=inside, other=0.0)
            out = tl.load(Out + place, mask=inside, other=0.0)
            delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
            tl.store(Delta + bh.to(tl.int64) * T + rows, delta, mask=on)
            lse = tl.load(Lse + bh.to(tl.int64) * T + rows, mask=on, other=float("inf"))
            begin, end = tl.min(first) // BN * BN, tl.max(last) + 1
            dq = tl.zeros([BM, BD], tl.float32)
            keys, values = K + b.to(tl.int64) * k_b + g * k_g, V + b.to(tl.int64) * v_b + g * v_g
            for start in range(begin, end, BN):
                n = start + tl.arange(0, BN)
                there = (n[:, None] < S) & (d[None, :] < D)
                k, v = _vectors(keys, n, k_s, d, there), _vectors(values, n, v_s, d, there)
                scores = _dot(q, tl.trans(k), PRECISION) * scale
                keep = _visible(n, last, first, KeyMask + b.to(tl.int64) * S, S, HAS_FIRST, HAS_MASK)
                weights = tl.where(keep, tl.exp2(scores - lse[:, None]), 0.0)
                dp = _dot(do, tl.trans(v), PRECISION)
                ds = weights * (dp - delta[:, None])
                dq += _dot(ds.to(k.dtype), k, PRECISION)
            tl.store(DQ + place, (dq * scaling).to(DQ.dtype.element_ty), mask=inside)

    @triton.jit
    def key_gradient_kernel(
        Q, K, V, Rows, Counts, Before, First, KeyMask, Lse, DOut, Delta, DK, DV,
        q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, o_b, o_h, o_t, d_b, d_g, d_s,
        T, S, scale, scaling,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        block, bg = tl.program_id(0), tl.program_id(1)
        b, g = bg // G, bg % G
        n, d = block * BN + tl.arange(0, BN), tl.arange(0, BD)
        there = (n[:, None] < S) & (d[None, :] < D)
        k = _vectors(K + b.to(tl.int64) * k_b + g * k_g, n, k_s, d, there)
        v = _vectors(V + b.to(tl.int64) * v_b + g * v_g, n, v_s, d, there)
        dk, dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
        # The first query that sees any of these keys.
        t0 = tl.maximum(block * BN - (S - T), 0)
        for r in range(H // G):
            h = g * (H // G) + r
            bh = b * H + h
            count = tl.load(Counts + bh)
            i0 = tl.load(Before + bh.to(tl.int64) * T + t0, mask=t0 < T, other=0)
            i0 = tl.where(t0 < T, i0, count)
            for start in range(i0 // BM * BM, count, BM):
                i = start + tl.arange(0, BM)
                on, rows, last, first = _listed(Rows, First, b, bh, i, count, T, S, HAS_FIRST)
                inside = on[:, None] & (d[None, :] < D)
                q = _vectors(Q + b.to(tl.int64) * q_b + h * q_h, rows, q_t, d, inside)
                do = _vectors(DOut + b.to(tl.int64) * o_b + h * o_h, rows, o_t, d, inside)
                lse = tl.load(Lse + bh.to(tl.int64) * T + rows, mask=on, other=float("inf"))
                delta = tl.load(Delta + bh.to(tl.int64) * T + rows, mask=on, other=0.0)
                scores = _dot(q, tl.trans(k), PRECISION) * scale
                keep = _visible(n, last, first, KeyMask + b.to(tl.int64) * S, S, HAS_FIRST, HAS_MASK)
                weights = tl.where(keep, tl.exp2(scores - lse[:, None]), 0.0)
                dv += _dot(tl.trans(weights.to(do.dtype)), do, PRECISION)
                dp = _dot(do, tl.trans(v), PRECISION)
                ds = weights * (dp - delta[:, None])
                dk += _dot(tl.trans(ds.to(q.dtype)), q, PRECISION)
        place = b.to(tl.int64) * d_b + g * d_g + n[:, None].to(tl.int64) * d_s + d[None, :]
        tl.store(DK + place, (dk * scaling).to(DK.dtype.element_ty), mask=there)
        tl.store(DV + place, dv.to(DV.dtype.element_ty), mask=there)


__all__ = ["forward_kernel", "key_gradient_kernel", "query_gradient_kernel", "triton"]
