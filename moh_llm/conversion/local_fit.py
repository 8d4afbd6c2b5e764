"""Plans of one layer with local fallbacks: which heads are always on, routed or never on.

The fallback is S = (1 - w) L + w F: local attention L, the distant token's value F, and its weight w in the softmax.
With near and far the log-sum-exp of the scores in sight and out of sight, w = sigmoid(far - near) would leave the
head's attention weights in sight as they are. far - log n, with n keys out of sight, is fitted as a linear function of
the layer's input, then F by least squares. Where that does harm, for heads that look up single tokens, the score is
lowered, up to having no distant token at all.

A fallback is fitted once, so that a head's cost c_h (see `moh_llm.conversion.fit`) does not depend on the plan, and one
regression gives the router of every plan. What a plan costs is the mean over held-out tokens of

    1/2 (sum of z_h over the heads that the token has off)^2,  z_h = g^T (o_h - s_h)

which needs one number per token and head: plans are compared by trying them.

Shapes: B batch, T tokens of a sequence, N tokens of all batches, C hidden size, D head size, H query heads,
KV key-value heads, U groups of heads that are switched together.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from moh_llm.conversion.fit import LayerSample, LocalSample, Ridge, RoutingFit, group_costs, group_metric
from moh_llm.devices import wide
from moh_llm.modeling.interval_attention_moh import near_attention
from moh_llm.modeling.seen_moh import Seen

STRIDE = 4  # every fourth token is compared with all keys before it
_ROWS = 64  # queries whose scores with all keys are held at once: more do not fit into the cache
_BLOCK = 128  # the same for scores with the keys in sight
NO_TOKEN = -100.0  # score that gives the distant token no weight
_SHIFTS = (0.0, -1.0, -2.0, -4.0)  # additions to the fitted score to try
_STEPS = 6  # numbers of shared heads, and of never-on ones, to try for each number of dropped heads


@torch.no_grad()
def sample_local(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Seen, scaling: float
) -> LocalSample:
    """Record local attention of T queries to T keys; see `near_attention`."""
    outputs = near_attention(queries, keys, values, seen, scaling)
    queries = (queries * scaling).unflatten(1, (keys.shape[1], -1))  # [B, KV, H / KV, T, D]
    near, far = _near(queries, keys, seen), _far(queries, keys, seen)
    hidden = seen.hidden[..., 0].clamp_min(1).expand(len(queries), -1)
    return LocalSample(
        outputs.flatten(0, 1).transpose(0, 1).float(),
        near.flatten(0, 1).float(),
        far.flatten(0, 1).float(),
        hidden.flatten().float(),
    )


def _near(queries: torch.Tensor, keys: torch.Tensor, seen: Seen) -> torch.Tensor:
    """Log-sum-exp of the scores in sight, `[B, T, H]`, for scaled queries `[B, KV, H / KV, T, D]`."""
    blocks = []
    block = min(seen.window, _BLOCK)
    for first in range(0, queries.shape[3], block):
        rows = slice(first, first + block)
        last, start, near, sink_end = (
            tensor[:, rows].expand(len(queries), -1, -1) for tensor in (seen.last, seen.start, seen.near, seen.sink_end)
        )
        # A document that begins after the block's first query has its sinks in the band.
        band = torch.arange(int(near.min()), int(last.max()) + 1, device=queries.device)
        sinks = start[:, :1, 0] + torch.arange(seen.sinks, device=queries.device)
        index = torch.cat([sinks, band.expand(len(queries), -1)], dim=1).unsqueeze(1)  # [B, 1, K]
        visible = (index <= last) & (index >= start) & ((index >= near) | (index < sink_end))
        visible[..., : seen.sinks] &= index[..., : seen.sinks] < band[0]  # else it is seen in the band
        given = zip(queries[:, :, :, rows].flatten(2, 3), keys, index[:, 0], ~visible, strict=True)
        blocks.append(torch.stack([_log_sum_exp(own, read[:, i], hidden).T for own, read, i, hidden in given]))
    return torch.cat(blocks, dim=1)


def _far(queries: torch.Tensor, keys: torch.Tensor, seen: Seen) -> torch.Tensor:
    """As `_near`, of the scores out of sight; NaN for all tokens but every `STRIDE`-th."""
    batch, _, _, length, _ = queries.shape
    far = queries.new_full((batch, length, queries.shape[1] * queries.shape[2]), math.nan)
    begin, end = torch.maximum(seen.start, seen.sink_end), seen.near
    for first in range(0, length, _ROWS * STRIDE):
        rows = torch.arange(first, min(first + _ROWS * STRIDE, length), STRIDE, device=queries.device)
        last = int(rows[-1]) + 1
        index = torch.arange(last, device=queries.device)
        hidden = ((index < begin[:, rows]) | (index >= end[:, rows])).expand(batch, -1, -1)
        for row, own in enumerate(queries[:, :, :, rows].flatten(2, 3)):
            far[row, rows] = _log_sum_exp(own, keys[row, :, :last], hidden[row]).T
    return far


def _log_sum_exp(queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """For queries `[KV, H / KV * R, D]` and the keys `[KV, K, D]` that are not `hidden` `[R, K]`: `[H, R]`."""
    scores = (queries @ keys.transpose(1, 2)).unflatten(1, (-1, len(hidden)))
    return scores.masked_fill_(hidden, -math.inf).logsumexp(-1).flatten(0, 1)


class LocalFitter:
    """Plans of one layer.

    Args:
        sample: the layer's calibration sample, with `local`.
        router: "linear" (the same number of heads for each token), "threshold" (that number on average) or "none"
            (the same heads for all tokens).
        shared_heads: ids of the shared heads, or how many to pick by importance; None to find the best number.
        group_size: how many adjacent heads are switched together.
    """

    def __init__(
        self, sample: LayerSample, router: str, shared_heads: Sequence[int] | int | None = None, group_size: int = 1
    ):
        assert sample.local is not None
        self.group_size, self.fitted, self.router = group_size, sample.fitted, router
        heads = len(sample.heads)
        self.score_weight, self.score_bias, self.value, self.residual = self.fit_distant_token(sample)
        costs = group_costs(self.residual[:, : sample.fitted], group_metric(sample, group_size))  # [N', U]
        self.importance: list[float] = costs.mean(0).tolist()
        self.ranked = sorted(range(heads // group_size), key=lambda group: -self.importance[group])
        self.shared_groups: list[int] | None = None
        if isinstance(shared_heads, int):
            self.shared_groups = self.ranked[: shared_heads // group_size]
        elif shared_heads is not None:
            self.shared_groups = sorted({head // group_size for head in shared_heads})
        self.shared_heads = self._heads(self.shared_groups or [])
        self.weight: torch.Tensor | None = None
        if router != "none":
            self.weight, self.bias = Ridge(sample.inputs[: sample.fitted])(0.5 * costs.clamp_min(1e-24).log())
            self.logits = sample.inputs @ self.weight.T + self.bias
        effects = torch.einsum(
            "hnd,nhd->nh",
            self.residual[:, sample.fitted :],
            (sample.gradients @ sample.o_proj).unflatten(1, (heads, -1)),
        )
        self.effects = effects.unflatten(1, (-1, group_size)).sum(-1)  # z, [N - N', U]

    def fit_distant_token(self, sample: LayerSample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The distant token's score, weight `[H, C]` and bias `[H]`, its value `[H, D]`, and H_h - S_h `[H, N, D]`."""
        local, fitted = sample.local, sample.fitted
        log_hidden = local.hidden.log()[:, None]
        compared = local.far[:fitted, 0].isfinite().nonzero()[:, 0]
        target = local.far[compared] - log_hidden[compared]
        weight, bias = Ridge(sample.inputs[compared])(target)
        score = sample.inputs @ weight.T + bias + log_hidden - local.near
        value, residual = torch.zeros_like(sample.heads[:, 0]), sample.heads - local.outputs
        for head, metric in enumerate(group_metric(sample, 1)):
            own = (residual[head, :fitted], local.outputs[head, :fitted], score[:fitted, head])
            shift, value[head] = _shift_and_value(*own, metric)
            if shift == NO_TOKEN:
                weight[head], bias[head] = 0, 0
            else:
                share = (score[:, head, None] + shift).sigmoid()
                residual[head] += share * (local.outputs[head] - value[head])
            bias[head] += shift
        return weight, bias, value, residual

    def fit(self, dropped: int) -> RoutingFit:
        """The plan with the least estimated KL that drops `dropped` heads per token, whole groups."""
        tried = ((self._cost(shared, local, dropped), shared, local) for shared, local in self._plans(dropped))
        cost, shared, local = min(tried, key=lambda plan: plan[0])
        routed = [group for group in range(len(self.ranked)) if group not in {*shared, *local}]
        off = self._heads([*routed, *local])
        tensors = {
            "fallback.distant_score.weight": self.score_weight[off],
            "fallback.distant_score.bias": self.score_bias[off],
            "fallback.distant_value": self.value[off],
        }
        if self.weight is not None and routed:
            bias = self.bias[routed]
            if self.router == "threshold":
                drops = dropped // self.group_size - len(local)
                bias = bias - _threshold(self.logits[:, routed], drops)
            tensors |= {"router.routed.weight": self.weight[routed], "router.routed.bias": bias}
        return RoutingFit(dropped, cost, tensors if off else {}, self._heads(shared), self._heads(local))

    def _plans(self, dropped: int) -> Iterator[tuple[list[int], list[int]]]:
        """Plans to compare: the groups that are always on, by importance, and those that are never on."""
        groups, drops = len(self.ranked), dropped // self.group_size
        if self.shared_groups is not None:
            yield self.shared_groups, []
            return
        yield self.ranked[: groups - drops], self.ranked[groups - drops :]
        if self.weight is None:
            return
        for local in _spread(0, drops - 1):
            for shared in _spread(0, groups - drops - 1):
                yield self.ranked[:shared], self.ranked[groups - local :]

    def _cost(self, shared: Sequence[int], local: Sequence[int], dropped: int) -> float:
        """Mean over held-out tokens of 1/2 (sum of z over the heads that the token has off)^2."""
        effect = self.effects[:, list(local)].sum(1)
        routed = [group for group in range(len(self.ranked)) if group not in {*shared, *local}]
        drops, effects = dropped // self.group_size - len(local), self.effects[:, routed]
        if routed and self.weight is None:
            effect = effect + effects.sum(1)
        elif routed and drops:
            logits = self.logits[self.fitted :, routed]
            if self.router == "threshold":  # the held-out tokens' own threshold, so that all plans drop the same number
                effect = effect + (effects * (logits <= _threshold(logits, drops))).sum(1)
            else:
                effect = effect + effects.gather(1, logits.topk(drops, 1, largest=False).indices).sum(1)
        return (effect.square().mean() / 2).item()

    def _heads(self, groups: Sequence[int]) -> list[int]:
        return sorted(group * self.group_size + i for group in groups for i in range(self.group_size))


def _threshold(logits: torch.Tensor, drops: int) -> torch.Tensor:
    """The logit up to which groups are off, so that tokens with logits `[N, U]` drop `drops` groups on average.

    It lies between two logits: at a token's own, rounding would decide whether the token has a group on.
    """
    logits, last = logits.flatten(), drops * len(logits)
    if not drops:
        return logits.min() - 1
    off, on = (logits.kthvalue(k).values for k in (last, min(last + 1, len(logits))))
    return off + (on - off) / 2


def _spread(low: int, high: int) -> list[int]:
    """At most `_STEPS` integers, evenly spaced from `low` to `high`."""
    count = min(_STEPS, high - low + 1)
    return sorted({low + round(i * (high - low) / max(1, count - 1)) for i in range(count)})


def _shift_and_value(
    missing: torch.Tensor, local: torch.Tensor, score: torch.Tensor, metric: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """The shift of the distant token's score and its value F `[D]` with the least mean of e^T M e over fitted tokens.

    With a token's missing part m = H - L `[N, D]` and weight w, e = m + w (L - F). The mean is expanded into products
    that do not depend on w, so that a shift costs two products with vectors.
    """
    by_missing, by_local = missing @ metric, local @ metric
    square, mixed, local_square = (
        wide((a * b).sum(1)) for a, b in ((by_missing, missing), (by_local, missing), (by_local, local))
    )
    best, shift, value = square.sum(), NO_TOKEN, torch.zeros_like(missing[0])
    for tried in _SHIFTS:
        share = (score + tried).sigmoid()
        weights, total = wide(share), share @ missing + share.square() @ local
        tried_value = total / share.square().sum().clamp_min(1e-12)
        cost = square.sum() + 2 * weights @ mixed + weights.square() @ local_square
        cost = cost - wide(total @ metric @ tried_value)
        if cost < best:
            best, shift, value = cost, tried, tried_value
    return shift, value
