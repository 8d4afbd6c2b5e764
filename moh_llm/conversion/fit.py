"""One layer's router and fallbacks in closed form, for every number of heads that it might drop.

Writing o_h = H_h W_O^h for what head h adds to the layer's output, s_h = S_h W_O^h for what its
fallback would, and g for the gradient of -log p(y), y drawn from the model, by a token's attention
output, dropping the heads D of that token costs to second order

    1/2 (g^T e)^2  nats of KL in expectation,  e = sum_{h in D} (o_h - s_h)

The mean of that over held-out tokens is a layer's estimated cost. One draw of y is too noisy to
choose heads by, so the fit itself uses its mean over tokens, M = mean of g g^T, and e^T M e.

The fit alternates two least-squares problems: the fallback of each head on the tokens that drop it,
and the router, a ridge regression of log c_h on the layer's input, c_h^2 = (o_h - s_h)^T M (o_h - s_h);
a token drops the heads of lowest fitted value. Heads that are switched together are one group, whose
c^2 is that of their summed o_h - s_h.

Shapes: N tokens, C hidden size, H query heads, D head size, R routed heads, U groups of u heads each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moh_llm.devices import wide

RIDGE = 1e-3  # of the mean variance of the inputs
_EVERYWHERE = 0.02  # weight of tokens that keep the head in the fit of its fallback: defines heads that no token drops
_ROUNDS = 2

_Fallback = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # share [H], level [H], fixed part [H, D]


@dataclass(frozen=True)
class LocalSample:
    """Local attention of one layer on the calibration text, float32.

    Attributes:
        outputs: of each head, without a distant token, `[H, N, D]`.
        near: log-sum-exp of the scores with the keys in sight, `[N, H]`.
        far: that of the keys out of sight, `[N, H]`; NaN for tokens where it was not measured.
        hidden: number of keys out of sight, at least 1, `[N]`.
    """

    outputs: torch.Tensor
    near: torch.Tensor
    far: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def join(cls, samples: Sequence["LocalSample"], order: torch.Tensor) -> "LocalSample":
        """The tokens of several samples, one after the other, in that order."""
        outputs = torch.cat([sample.outputs for sample in samples], dim=1)[:, order]
        rows = ([getattr(sample, name) for sample in samples] for name in ("near", "far", "hidden"))
        return cls(outputs, *(torch.cat(parts)[order] for parts in rows))


@dataclass
class LayerSample:
    """Statistics of one layer on the calibration text, all float32.

    Attributes:
        inputs: the attention layer's input x, `[N, C]`.
        heads: head outputs H_h, `[H, N, D]`.
        values: each head's value vector of the token itself, `[H, N, D]`.
        sensitivity: M, `[C, C]`.
        gradients: g of the held-out tokens, `[N - fitted, C]`.
        o_proj: weight of the output projection, `[C, H * D]`.
        fitted: the number of tokens, the first ones, to fit on; the others measure the cost.
        local: local attention, for plans with local fallbacks.
        together: tokens, one after the other, that make one prediction: those of an image. Their errors add up.
    """

    inputs: torch.Tensor
    heads: torch.Tensor
    values: torch.Tensor
    sensitivity: torch.Tensor
    gradients: torch.Tensor
    o_proj: torch.Tensor
    fitted: int
    local: LocalSample | None = None
    together: int = 1


@dataclass(frozen=True)
class RoutingFit:
    """Router and fallbacks of one layer at one number of dropped heads.

    Attributes:
        dropped: heads that a token drops, with a threshold router on average.
        cost: estimated KL on held-out tokens, in nats per token.
        tensors: by name within the attention layer: `router.routed.*`, `fallback.*`.
        shared_heads, never_on_heads: ids of the heads that are always on, and never on.
    """

    dropped: int
    cost: float
    tensors: dict[str, torch.Tensor]
    shared_heads: list[int]
    never_on_heads: list[int] = field(default_factory=list)


class Ridge:
    """Ridge regression on fixed inputs `[N, C]` with a bias that is not shrunk; normal equations in float64."""

    def __init__(self, inputs: torch.Tensor):
        self.mean = inputs.mean(0)
        self.centred = inputs - self.mean
        covariance = wide(self.centred.T @ self.centred) / len(inputs)
        # Never zero: inputs that do not vary give a weight of zero, not an error.
        covariance.diagonal().add_(RIDGE * covariance.diagonal().mean() + torch.finfo(torch.float32).tiny)
        self.factor = torch.linalg.cholesky(covariance)

    def __call__(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight `[K, C]` and bias `[K]` for targets `[N, K]`."""
        mean = targets.mean(0)
        cross = wide(self.centred.T @ (targets - mean)) / len(targets)
        weight = torch.cholesky_solve(cross, self.factor).T.to(targets)
        return weight.contiguous(), mean - weight @ self.mean


def group_metric(sample: LayerSample, group_size: int) -> torch.Tensor:
    """W^T M W / 2 of each group's rows W of the output projection, `[U, u * D, u * D]`."""
    heads, size = len(sample.heads), sample.heads.shape[-1]
    slices = sample.o_proj.unflatten(1, (heads // group_size, group_size * size)).transpose(0, 1)  # [U, C, u * D]
    return slices.transpose(1, 2) @ sample.sensitivity @ slices / 2


def group_costs(residual: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """c^2 / 2 of each group for residuals of heads `[H, N, D]` and `group_metric`; returns `[N, U]`."""
    residual = residual.unflatten(0, (len(metric), -1)).transpose(1, 2).flatten(2)  # [U, N, u * D]
    return (torch.bmm(residual, metric) * residual).sum(-1).T


class LayerFitter:
    """Fits of one layer.

    Args:
        sample: the layer's calibration sample.
        shared_heads: ids of the shared heads, or how many to pick by importance, the cost of replacing them by their
            fallback. Whole groups in either case.
        fallback: whether dropped heads get a fitted fallback.
        group_size: u, how many adjacent heads are switched together.
        routes: whether tokens choose their heads; otherwise the most important ones are on for all tokens.
    """

    def __init__(
        self,
        sample: LayerSample,
        shared_heads: Sequence[int] | int,
        fallback: bool,
        group_size: int = 1,
        routes: bool = True,
    ):
        self.sample, self.fallback, self.group_size, self.routes = sample, fallback, group_size, routes
        self.ridge = Ridge(sample.inputs[: sample.fitted])
        # Views: the fitted tokens come first.
        self.heads, self.values = sample.heads[:, : sample.fitted], sample.values[:, : sample.fitted]
        self.metric = group_metric(sample, group_size)
        if fallback:
            self._fit_own_share()
        residual = self._residual(self._fit_fallback(self._weights()), slice(sample.fitted))
        # Mean of c^2 / 2 where the group is always dropped.
        self.importance: list[float] = group_costs(residual, self.metric).mean(0).tolist()
        if isinstance(shared_heads, int):
            shared_heads = self._most_important(shared_heads)
        self.shared_heads = list(shared_heads)

    def fit(self, dropped: int) -> RoutingFit:
        """Router and fallbacks for tokens that drop `dropped` of the routed heads, whole groups."""
        if not self.routes:
            return self._fit_fixed(dropped)
        sample, routed, group_size = self.sample, self._others(self.shared_heads), self.group_size
        routed_groups = [head // group_size for head in routed[::group_size]]
        drops = None
        for _ in range(_ROUNDS if self.fallback else 1):
            fallback = self._fit_fallback(self._weights(routed, drops))
            costs = group_costs(self._residual(fallback, slice(sample.fitted)), self.metric)[:, routed_groups]
            # The log of a residual of zero is low but finite.
            weight, bias = self.ridge(0.5 * costs.clamp_min(1e-24).log())
            logits = sample.inputs @ weight.T + bias
            lowest = logits.topk(dropped // group_size, 1, largest=False).indices
            drops = torch.zeros_like(logits).scatter(1, lowest, 1.0).repeat_interleave(group_size, 1)
        return self.fit_fallbacks(drops, {"router.routed.weight": weight, "router.routed.bias": bias})

    def fit_fallbacks(self, drops: torch.Tensor, router: dict[str, torch.Tensor]) -> RoutingFit:
        """Fallbacks for a router, given its tensors by name within the attention layer, and what tokens drop by it.

        ``drops`` is 1 where a token drops a routed head, else 0, `[N, R]`; each token drops the same number.
        """
        routed = self._others(self.shared_heads)
        # Fallbacks come last, so that their error has no mean: an error that all tokens share adds up.
        fallback = self._fit_fallback(self._weights(routed, drops))
        held_out = slice(self.sample.fitted, None)
        cost = self._set_cost(self._residual(fallback, held_out), routed, drops[held_out])
        return RoutingFit(int(drops[0].sum()), cost, router | self._tensors(fallback, routed), self.shared_heads)

    def _fit_fixed(self, dropped: int) -> RoutingFit:
        """Fallbacks where all tokens drop the same, least important heads."""
        shared = self._most_important(len(self.heads) - dropped)
        routed = self._others(shared)
        fallback = self._fit_fallback(torch.ones_like(self.heads[..., 0]))
        residual = self._residual(fallback, slice(self.sample.fitted, None))
        cost = self._set_cost(residual, routed, residual.new_ones(residual.shape[1], dropped))
        return RoutingFit(dropped, cost, self._tensors(fallback, routed), shared)

    def _most_important(self, count: int) -> list[int]:
        """Sorted ids of the `count` most important heads, whole groups."""
        ranked = sorted(range(len(self.importance)), key=lambda number: -self.importance[number])
        groups = ranked[: count // self.group_size]
        return [head for head in range(len(self.heads)) if head // self.group_size in groups]

    def _others(self, heads: Sequence[int]) -> list[int]:
        return [head for head in range(len(self.heads)) if head not in heads]

    def _tensors(self, fallback: _Fallback | None, routed: Sequence[int]) -> dict[str, torch.Tensor]:
        """The weights of the routed heads' fallbacks, by name."""
        if fallback is None or not routed:
            return {}
        share, level, fixed = fallback
        return {
            "fallback.own_value.weight": share[routed, None] * self.share_weight[routed],
            "fallback.own_value.bias": level[routed] + share[routed] * self.share_bias[routed],
            "fallback.bias": fixed[routed],
        }

    def _weights(self, routed: Sequence[int] = (), drops: torch.Tensor | None = None) -> torch.Tensor:
        """Weight of each fitted token in the fit of each head's fallback `[H, N']`: tokens that drop it count most."""
        weights = torch.ones_like(self.heads[..., 0])
        if drops is not None:
            weights.fill_(_EVERYWHERE)
            weights[routed] += drops[: self.sample.fitted].T
        return weights

    def _set_cost(self, residual: torch.Tensor, routed: Sequence[int], drops: torch.Tensor) -> float:
        """Mean of 1/2 (g^T e)^2 over held-out predictions, given residuals `[H, N, D]` and drops `[N, R]`.

        The sum over the tokens of a prediction is squared, not its terms.
        """
        masked = torch.zeros_like(residual)
        masked[routed] = residual[routed] * drops.T[..., None]
        error = masked.transpose(0, 1).flatten(1) @ self.sample.o_proj.T
        changes = (error * self.sample.gradients).sum(1).unflatten(0, (-1, self.sample.together)).sum(1)
        return (changes.square().mean() / 2).item()

    def _fit_own_share(self) -> None:
        """Regress a_h = <H_h - b_h, v> / <v, v>, the share of a head that its own value explains, on x.

        b_h is the offset of the least-squares fit H_h = b_h + a_h v with one number a_h per head.
        """
        heads, values = self.heads, self.values
        head_mean, value_mean = heads.mean(1, keepdim=True), values.mean(1, keepdim=True)
        spread = ((values - value_mean) ** 2).sum((1, 2)).clamp_min(1e-12)
        slope = ((heads - head_mean) * (values - value_mean)).sum((1, 2)) / spread
        offset = head_mean - slope[:, None, None] * value_mean
        share = ((heads - offset) * values).sum(-1) / values.square().sum(-1).clamp_min(1e-6)
        # A value vector next to zero makes the quotient wild; an attention weight lies in [0, 1].
        self.share_weight, self.share_bias = self.ridge(share.clamp(-2, 2).T)
        self.shares = (self.sample.inputs @ self.share_weight.T + self.share_bias).T  # [H, N]

    def _fit_fallback(self, weights: torch.Tensor) -> _Fallback | None:
        """Weighted least squares of H_h = b_h + (level_h + share_h a_h(x)) v over fitted tokens.

        Given weights `[H, N']` of the tokens, returns share `[H]`, level `[H]`, b `[H, D]`; None without fallbacks.
        """
        if not self.fallback:
            return None
        heads, values, shares = self.heads, self.values, self.shares[:, : self.sample.fitted]
        total = weights.sum(1)

        def mean(factor: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
            return torch.bmm(factor[:, None], vectors)[:, 0] / total[:, None]

        head_mean, value_mean, shared_mean = mean(weights, heads), mean(weights, values), mean(weights * shares, values)
        value_value, head_value = values.square().sum(-1), (heads * values).sum(-1)

        def moment(factor: torch.Tensor, products: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (weights * factor * products).sum(1) / total - (a * b).sum(1)

        ones = torch.ones_like(shares)
        vv = moment(ones, value_value, value_mean, value_mean)
        vs = moment(shares, value_value, value_mean, shared_mean)
        ss = moment(shares * shares, value_value, shared_mean, shared_mean)
        hv = moment(ones, head_value, head_mean, value_mean)
        hs = moment(shares, head_value, head_mean, shared_mean)
        normal = wide(torch.stack([torch.stack([vv, vs], -1), torch.stack([vs, ss], -1)], -2))
        ridge = 1e-6 * normal.diagonal(dim1=1, dim2=2).mean(1) + 1e-12
        normal = normal + ridge[:, None, None] * torch.eye(2, dtype=normal.dtype, device=normal.device)
        solution = torch.linalg.solve(normal, wide(torch.stack([hv, hs], -1))).to(heads)
        level, share = solution.unbind(-1)
        return share, level, head_mean - level[:, None] * value_mean - share[:, None] * shared_mean

    def _residual(self, fallback: _Fallback | None, tokens: slice) -> torch.Tensor:
        """H_h minus its fallback, `[H, N, D]`, for some tokens."""
        if fallback is None:
            return self.sample.heads[:, tokens]
        share, level, fixed = fallback
        factor = level[:, None] + share[:, None] * self.shares[:, tokens]
        return self.sample.heads[:, tokens] - fixed[:, None] - factor[..., None] * self.sample.values[:, tokens]
