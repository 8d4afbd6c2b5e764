"""The Triton kernels of `head_sparse`: lists of the queries of each head, attention of these, and its gradients.

Shapes: B batch, T queries, S keys, H query heads, G heads of keys and values, D head size.

Lists are per batch row and head: `Rows` `[B, H, T]` holds the positions in order, `Counts` `[B, H]`
how many there are, `Before` `[B, H, T]` how many stand before a position; `Gate` is `[B, T, H]`. A
tile is `BM` entries of a list against blocks of `BN` keys. Blocks that all of a tile's queries see
are computed without a mask, those before (packed documents) and behind (the causal edge) with one.
Scores are kept in base 2: `scale` is scaling * log2(e). Lists are made by one launch, and the host never reads how long
they are, so that all of this works in a CUDA graph.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = dot = keys_at = forward_kernel = query_gradient_kernel = key_gradient_kernel = None

Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, counts, before

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

    @triton.jit
    def dot(a, b, PRECISION: tl.constexpr):
        """A product of two tiles, added up in float32."""
        if PRECISION == "interpreted":  # whose bfloat16 are bit patterns that it would multiply as integers
            return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
        return tl.dot(a, b, input_precision=PRECISION)

    @triton.jit
    def keys_at(X, n, stride, d, S, D: tl.constexpr, CHECKED: tl.constexpr):
        """The vectors of keys or values `n` as the rows of a tile; `CHECKED` where some may lie behind the last."""
        where = X + n[:, None].to(tl.int64) * stride + d[None, :]
        if CHECKED:
            return tl.load(where, mask=(n[:, None] < S) & (d[None, :] < D), other=0.0)
        if d.shape[0] == D:
            return tl.load(where)
        return tl.load(where, mask=d[None, :] < D, other=0.0)

    @triton.jit
    def _queries_at(X, rows, stride, d, on, D: tl.constexpr):
        """The vectors of the listed queries as the rows of a tile, zero behind the end of the list."""
        where = X + rows[:, None].to(tl.int64) * stride + d[None, :]
        return tl.load(where, mask=on[:, None] & (d[None, :] < D), other=0.0)

    @triton.jit
    def _gates_at(Gate, b, h, rows, on, T, H: tl.constexpr):
        """The gates `[M]` of the listed queries, zero behind the end of the list."""
        return tl.load(Gate + (b.to(tl.int64) * T + rows) * H + h, mask=on, other=0.0)

    @triton.jit
    def _masked(scores, n, last, first, key_mask, S, HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr):
        """Scores `[M, N]`, minus infinity where a query does not see a key."""
        keep = (n[None, :] <= last[:, None]) & (n[None, :] < S)
        if HAS_FIRST:
            keep &= n[None, :] >= first[:, None]
        if HAS_MASK:
            keep &= tl.load(key_mask + n, mask=n < S, other=0)[None, :] != 0
        return tl.where(keep, scores, -float("inf"))

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
    def _spans(on, last, first, S, BN: tl.constexpr, HAS_MASK: tl.constexpr):
        """Keys that some of a tile's queries see, from `begin` to `end`, and whole blocks that all see, within."""
        begin, end = tl.min(first) // BN * BN, tl.max(last) + 1
        low = (tl.max(tl.where(on, first, 0)) + BN - 1) // BN * BN
        high = (tl.min(tl.where(on, last, S)) + 1) // BN * BN
        none = high <= low
        if HAS_MASK:
            none = True
        return begin, tl.where(none, begin, low), tl.where(none, begin, high), end

    @triton.jit
    def _attend(
        m, total, acc, q, keys, values, k_s, v_s, d, last, first, key_mask, low, high, S, scale,
        D: tl.constexpr, BN: tl.constexpr,
        MASKED: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """A tile's running maximum, sum of weights and weighted sum of values, over keys from `low` to `high`."""
        for start in range(low, high, BN):
            n = start + tl.arange(0, BN)
            k, v = keys_at(keys, n, k_s, d, S, D, MASKED), keys_at(values, n, v_s, d, S, D, MASKED)
            scores = dot(q, tl.trans(k), PRECISION) * scale
            if MASKED:
                scores = _masked(scores, n, last, first, key_mask, S, HAS_FIRST, HAS_MASK)
            new = tl.maximum(m, tl.max(scores, 1))
            # A row that has seen no key yet keeps -inf; 0 in its place avoids inf - inf.
            safe = tl.where(new == -float("inf"), 0.0, new) if MASKED else new
            weights = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(m - safe)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + dot(weights.to(v.dtype), v, PRECISION)
            m = new
        return m, total, acc

    @triton.jit(do_not_specialize=["T", "S"])  # else each length is compiled anew
    def forward_kernel(
        Q, K, V, Gate, Rows, Counts, First, KeyMask, Out, Lse,
        q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, o_b, o_h, o_t,
        T, S, scale,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        # Tiles with the most keys first, so that the last to finish are short.
        tile, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
        b, h = bh // H, bh % H
        g = h // (H // G)
        count = tl.load(Counts + bh)
        if tile * BM < count:
            i, d = tile * BM + tl.arange(0, BM), tl.arange(0, BD)
            on, rows, last, first = _listed(Rows, First, b, bh, i, count, T, S, HAS_FIRST)
            q = _queries_at(Q + b.to(tl.int64) * q_b + h * q_h, rows, q_t, d, on, D)
            keys, values = K + b.to(tl.int64) * k_b + g * k_g, V + b.to(tl.int64) * v_b + g * v_g
            mask = KeyMask + b.to(tl.int64) * S
            begin, low, high, end = _spans(on, last, first, S, BN, HAS_MASK)
            m = tl.full([BM], -float("inf"), tl.float32)
            total, acc = tl.zeros([BM], tl.float32), tl.zeros([BM, BD], tl.float32)
            if HAS_FIRST:
                m, total, acc = _attend(
                    m, total, acc, q, keys, values, k_s, v_s, d, last, first, mask, begin, low, S, scale,
                    D, BN, True, HAS_FIRST, HAS_MASK, PRECISION,
                )  # fmt: skip
            m, total, acc = _attend(
                m, total, acc, q, keys, values, k_s, v_s, d, last, first, mask, low, high, S, scale,
                D, BN, False, HAS_FIRST, HAS_MASK, PRECISION,
            )  # fmt: skip
            m, total, acc = _attend(
                m, total, acc, q, keys, values, k_s, v_s, d, last, first, mask, high, end, S, scale,
                D, BN, True, HAS_FIRST, HAS_MASK, PRECISION,
            )  # fmt: skip
            seen = total > 0
            acc = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
            if GATED:
                acc *= _gates_at(Gate, b, h, rows, on, T, H)[:, None]
            place = Out + b.to(tl.int64) * o_b + h * o_h + rows[:, None].to(tl.int64) * o_t + d[None, :]
            tl.store(place, acc.to(Out.dtype.element_ty), mask=on[:, None] & (d[None, :] < D))
            lse = tl.where(seen, m + tl.log2(tl.where(seen, total, 1.0)), float("inf"))
            tl.store(Lse + bh.to(tl.int64) * T + rows, lse, mask=on)

    @triton.jit
    def _add_query_gradient(
        dq, q, do, lse, delta, keys, values, k_s, v_s, d, last, first, key_mask, low, high, S, scale,
        D: tl.constexpr, BN: tl.constexpr,
        MASKED: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Adds to a tile's gradient what keys from `low` to `high` give."""
        for start in range(low, high, BN):
            n = start + tl.arange(0, BN)
            k, v = keys_at(keys, n, k_s, d, S, D, MASKED), keys_at(values, n, v_s, d, S, D, MASKED)
            scores = dot(q, tl.trans(k), PRECISION) * scale
            if MASKED:
                scores = _masked(scores, n, last, first, key_mask, S, HAS_FIRST, HAS_MASK)
            weights = tl.exp2(scores - lse[:, None])
            ds = weights * (dot(do, tl.trans(v), PRECISION) - delta[:, None])
            dq += dot(ds.to(k.dtype), k, PRECISION)
        return dq

    @triton.jit(do_not_specialize=["T", "S"])  # else each length is compiled anew
    def query_gradient_kernel(
        Q, K, V, Gate, Rows, Counts, First, KeyMask, Out, Lse, DOut, DQ, Delta, DGate,
        q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, o_b, o_h, o_t,
        T, S, scale, scaling,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        tile, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
        b, h = bh // H, bh % H
        g = h // (H // G)
        count = tl.load(Counts + bh)
        if tile * BM < count:
            i, d = tile * BM + tl.arange(0, BM), tl.arange(0, BD)
            on, rows, last, first = _listed(Rows, First, b, bh, i, count, T, S, HAS_FIRST)
            q = _queries_at(Q + b.to(tl.int64) * q_b + h * q_h, rows, q_t, d, on, D)
            of_head = b.to(tl.int64) * o_b + h * o_h
            do = _queries_at(DOut + of_head, rows, o_t, d, on, D)
            out = _queries_at(Out + of_head, rows, o_t, d, on, D)
            delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
            tl.store(Delta + bh.to(tl.int64) * T + rows, delta, mask=on)
            if GATED:  # the output was gate * H: its product with the gradient is that of H with the gradient by H
                gate = _gates_at(Gate, b, h, rows, on, T, H)
                tl.store(DGate + (b.to(tl.int64) * T + rows) * H + h, delta / tl.where(on, gate, 1.0), mask=on)
                do = (do * gate[:, None]).to(do.dtype)
            lse = tl.load(Lse + bh.to(tl.int64) * T + rows, mask=on, other=float("inf"))
            keys, values = K + b.to(tl.int64) * k_b + g * k_g, V + b.to(tl.int64) * v_b + g * v_g
            mask = KeyMask + b.to(tl.int64) * S
            begin, low, high, end = _spans(on, last, first, S, BN, HAS_MASK)
            dq = tl.zeros([BM, BD], tl.float32)
            if HAS_FIRST:
                dq = _add_query_gradient(
                    dq, q, do, lse, delta, keys, values, k_s, v_s, d, last, first, mask, begin, low, S, scale,
                    D, BN, True, HAS_FIRST, HAS_MASK, PRECISION,
                )  # fmt: skip
            dq = _add_query_gradient(
                dq, q, do, lse, delta, keys, values, k_s, v_s, d, last, first, mask, low, high, S, scale,
                D, BN, False, HAS_FIRST, HAS_MASK, PRECISION,
            )  # fmt: skip
            dq = _add_query_gradient(
                dq, q, do, lse, delta, keys, values, k_s, v_s, d, last, first, mask, high, end, S, scale,
                D, BN, True, HAS_FIRST, HAS_MASK, PRECISION,
            )  # fmt: skip
            place = DQ + of_head + rows[:, None].to(tl.int64) * o_t + d[None, :]
            tl.store(place, (dq * scaling).to(DQ.dtype.element_ty), mask=on[:, None] & (d[None, :] < D))

    @triton.jit
    def _entry(Before, bh, t, count, T):
        """How many entries of a list stand before position `t`, which may be the end."""
        before = tl.load(Before + bh.to(tl.int64) * T + t, mask=t < T, other=0)
        return tl.where(t < T, before, count)

    @triton.jit
    def _add_key_gradients(
        dk, dv, k, v, n, d, b, h, bh, Q, DOut, Gate, Rows, First, key_mask, Lse, Delta, q_t, o_t,
        low, high, end, T, S, scale,
        H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr,
        HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Adds to a block's gradients what the entries from `low` to `high` of a list of `end` give."""
        for start in range(low, high, BM):
            on, rows, last, first = _listed(Rows, First, b, bh, start + tl.arange(0, BM), end, T, S, HAS_FIRST)
            q, do = _queries_at(Q, rows, q_t, d, on, D), _queries_at(DOut, rows, o_t, d, on, D)
            if GATED:
                do = (do * _gates_at(Gate, b, h, rows, on, T, H)[:, None]).to(do.dtype)
            # Behind the end of the list all weights are 2^-inf = 0, without a mask, too.
            lse = tl.load(Lse + bh.to(tl.int64) * T + rows, mask=on, other=float("inf"))
            delta = tl.load(Delta + bh.to(tl.int64) * T + rows, mask=on, other=0.0)
            scores = dot(q, tl.trans(k), PRECISION) * scale
            if MASKED:
                scores = _masked(scores, n, last, first, key_mask, S, HAS_FIRST, HAS_MASK)
            weights = tl.exp2(scores - lse[:, None])
            dv += dot(tl.trans(weights.to(do.dtype)), do, PRECISION)
            ds = weights * (dot(do, tl.trans(v), PRECISION) - delta[:, None])
            dk += dot(tl.trans(ds.to(q.dtype)), q, PRECISION)
        return dk, dv

    @triton.jit(do_not_specialize=["T", "S"])  # else each length is compiled anew
    def key_gradient_kernel(
        Q, K, V, Gate, Rows, Counts, Before, First, Whole, Until, KeyMask, Lse, DOut, Delta, DK, DV,
        q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s, o_b, o_h, o_t, d_b, d_g, d_s,
        T, S, scale, scaling,
        H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
        HAS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        block, bg = tl.program_id(0), tl.program_id(1)
        b, g = bg // G, bg % G
        n, d = block * BN + tl.arange(0, BN), tl.arange(0, BD)
        k = keys_at(K + b.to(tl.int64) * k_b + g * k_g, n, k_s, d, S, D, True)
        v = keys_at(V + b.to(tl.int64) * v_b + g * v_g, n, v_s, d, S, D, True)
        mask = KeyMask + b.to(tl.int64) * S
        dk, dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
        # Queries from t0 on see some of these keys, from t1 on all of them; with packed documents those before t2 see
        # all, and those from t3 on none.
        t0 = tl.maximum(block * BN - (S - T), 0)
        t1 = tl.maximum(tl.minimum(block * BN + BN, S) - 1 - (S - T), 0)
        t2, t3 = T, T
        if HAS_FIRST:
            t2 = tl.load(Whole + b.to(tl.int64) * S + block * BN)
            t3 = tl.load(Until + b.to(tl.int64) * S + tl.minimum(block * BN + BN, S) - 1)
        for r in range(H // G):
            h = g * (H // G) + r
            bh = b * H + h
            count = tl.load(Counts + bh)
            i0, end = _entry(Before, bh, t0, count, T), _entry(Before, bh, t3, count, T)
            i1, i2 = _entry(Before, bh, t1, count, T), _entry(Before, bh, t2, count, T)
            if HAS_MASK:
                i1 = end
            # Tiles begin where the last ended: the edge is rounded up, and what all see down, unless it is the end.
            low = tl.minimum(i0 + (i1 - i0 + BM - 1) // BM * BM, tl.maximum(end, i0))
            high = low + tl.maximum(i2 - low, 0) // BM * BM
            high = tl.where(i2 >= end, tl.maximum(end, low), high)
            queries, gradients = Q + b.to(tl.int64) * q_b + h * q_h, DOut + b.to(tl.int64) * o_b + h * o_h
            dk, dv = _add_key_gradients(
                dk, dv, k, v, n, d, b, h, bh, queries, gradients, Gate, Rows, First, mask, Lse, Delta, q_t, o_t,
                i0, low, end, T, S, scale, H, D, BM, True, HAS_FIRST, HAS_MASK, GATED, PRECISION,
            )  # fmt: skip
            dk, dv = _add_key_gradients(
                dk, dv, k, v, n, d, b, h, bh, queries, gradients, Gate, Rows, First, mask, Lse, Delta, q_t, o_t,
                low, high, end, T, S, scale, H, D, BM, False, HAS_FIRST, HAS_MASK, GATED, PRECISION,
            )  # fmt: skip
            if HAS_FIRST:
                dk, dv = _add_key_gradients(
                    dk, dv, k, v, n, d, b, h, bh, queries, gradients, Gate, Rows, First, mask, Lse, Delta, q_t, o_t,
                    high, end, end, T, S, scale, H, D, BM, True, HAS_FIRST, HAS_MASK, GATED, PRECISION,
                )  # fmt: skip
        place = b.to(tl.int64) * d_b + g * d_g + n[:, None].to(tl.int64) * d_s + d[None, :]
        there = (n[:, None] < S) & (d[None, :] < D)
        tl.store(DK + place, (dk * scaling).to(DK.dtype.element_ty), mask=there)
        tl.store(DV + place, dv.to(DV.dtype.element_ty), mask=there)


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
