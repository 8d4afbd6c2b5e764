"""Routers and stand-ins against loops in float64, and the tensors against the cost that goes with them."""

import dataclasses

import numpy as np
import pytest
import torch

from moh_llm.conversion.fit import _EVERYWHERE, RIDGE, LayerFitter, LayerSample, Ridge

ROUTER = {"router.routed.weight", "router.routed.bias"}
STAND_IN = {"stand_in.own_value.weight", "stand_in.own_value.bias", "stand_in.bias"}


def make_sample(heads=4, groups=1, tokens=80, fitted=60, hidden=8, size=3):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    root, values = randn(hidden, hidden), randn(heads // groups, tokens, size).repeat_interleave(groups, 0)
    outputs = 0.4 * values + randn(heads, tokens, size)
    gradients, o_proj = randn(tokens - fitted, hidden), randn(hidden, heads * size)
    return LayerSample(randn(tokens, hidden) + 1, outputs, values, root @ root.T, gradients, o_proj, fitted)


def doubles(tensors):
    return {name: tensor.double().numpy() for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def ridge(x, y):
    """Weight `[K, C]` and bias `[K]` by the normal equations."""
    centred = x - x.mean(0)
    covariance = centred.T @ centred / len(x)
    penalty = RIDGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    weight = np.linalg.solve(covariance + penalty, centred.T @ (y - y.mean(0)) / len(x)).T
    return weight, y.mean(0) - weight @ x.mean(0)


def half_squares(sample, tokens, unit=1):
    """1/2 o^T M o of every unit, o the sum of its heads' outputs, `[N, U]`."""
    s, size = doubles(vars(sample)), sample.heads.shape[-1]
    outputs = np.array(
        [[s["o_proj"][:, h * size :][:, :size] @ v[t] for h, v in enumerate(s["heads"])] for t in tokens]
    )
    outputs = np.array([[sum(row[h : h + unit]) for h in range(0, len(row), unit)] for row in outputs])
    return np.array([[o @ s["sensitivity"] @ o / 2 for o in row] for row in outputs])


def held_out_cost(sample, fit, routed, unit=1):
    s, tensors, size = doubles(vars(sample)), doubles(fit.tensors), sample.heads.shape[-1]
    costs = []
    for t in range(sample.fitted, len(s["inputs"])):
        x, error = s["inputs"][t], 0
        logits = tensors["router.routed.weight"] @ x + tensors["router.routed.bias"]
        for i in [row * unit + h for row in np.argsort(logits)[: fit.dropped // unit] for h in range(unit)]:
            missing = s["heads"][routed[i], t]
            if "stand_in.bias" in tensors:
                share = tensors["stand_in.own_value.weight"][i] @ x + tensors["stand_in.own_value.bias"][i]
                missing = missing - (tensors["stand_in.bias"][i] + share * s["values"][routed[i], t])
            error = error + s["o_proj"][:, routed[i] * size :][:, :size] @ missing
        costs.append((s["gradients"][t - sample.fitted] @ error) ** 2 / 2)
    return np.mean(costs)


def test_ridge_solves_the_normal_equations_with_a_free_bias():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 6, generator=generator) * torch.tensor([0.1, 1, 1, 2, 3, 9]) + 5
    targets = torch.randn(50, 3, generator=generator) + 100
    weight, bias = Ridge(inputs)(targets)
    expected, expected_bias = ridge(inputs.double().numpy(), targets.double().numpy())
    np.testing.assert_allclose(weight, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(bias, expected_bias, rtol=1e-5)


@pytest.mark.parametrize(("heads", "unit"), [(1, 1), (4, 1), (9, 1), (4, 4), (9, 3)])
def test_importance_is_half_the_squared_output_of_a_unit_without_stand_in(heads, unit):
    sample = make_sample(heads, unit)
    importance = LayerFitter(sample, 0, stand_in=False, unit=unit).importance
    np.testing.assert_allclose(importance, half_squares(sample, range(sample.fitted), unit).mean(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "unit", "shared", "routed"), [(5, 1, [1, 3], [0, 2, 4]), (8, 2, [2, 3], [0, 2, 3])], ids=str
)
def test_router_is_the_ridge_of_the_log_error(heads, unit, shared, routed):
    sample = make_sample(heads, unit)
    tensors = LayerFitter(sample, shared, stand_in=False, unit=unit).fit(unit).tensors
    log_error = np.log(half_squares(sample, range(sample.fitted), unit)[:, routed]) / 2
    weight, bias = ridge(sample.inputs[: sample.fitted].double().numpy(), log_error)
    np.testing.assert_allclose(tensors["router.routed.weight"], weight, rtol=1e-3, atol=1e-5)
    differences = (tensors["router.routed.bias"] - tensors["router.routed.bias"][0]).numpy()
    np.testing.assert_allclose(differences, bias - bias[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "shared", "unit"),
    [
        (2, 1, [], 1),
        (4, 2, [0], 1),
        (6, 3, [1, 4], 1),
        (9, 3, [0, 1, 8], 1),
        (9, 3, [3, 4, 5], 3),
        (8, 2, [6, 7], 2),
        (4, 4, [], 4),
    ],
    ids=str,
)
def test_cost_is_what_the_tensors_do_to_held_out_tokens(heads, groups, shared, unit, stand_in):
    sample = make_sample(heads, groups)
    fitter = LayerFitter(sample, shared, stand_in, unit)
    routed = [head for head in range(heads) if head not in shared]
    assert (fitter.shared_heads, fitter.routed_heads) == (shared, routed)
    for dropped in range(unit, len(routed) + 1, unit):
        fit = fitter.fit(dropped)
        assert len(fit.tensors["router.routed.weight"]) == len(routed) // unit
        assert fit.dropped == dropped and fit.tensors.keys() == (ROUTER | STAND_IN if stand_in else ROUTER)
        assert fit.cost == pytest.approx(held_out_cost(sample, fit, routed, unit), rel=1e-4)


@pytest.mark.parametrize(("dropped", "unit"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)])
def test_stand_in_is_least_squares_over_the_tokens_that_drop_the_head(dropped, unit):
    sample = make_sample(4 * unit, groups=2)
    routed = [head for head in range(4 * unit) if head // unit != 2]
    tensors = doubles(LayerFitter(sample, [2 * unit + h for h in range(unit)], True, unit).fit(dropped).tensors)
    s, n = doubles(vars(sample)), sample.fitted
    logits = s["inputs"][:n] @ tensors["router.routed.weight"].T + tensors["router.routed.bias"]
    ranks = (unit * logits.argsort(1).argsort(1)).repeat(unit, 1)
    for i, head in enumerate(routed):
        counts = (_EVERYWHERE + (ranks[:, i] < dropped))[:, None]
        values = s["values"][head, :n]
        weight, bias = tensors["stand_in.own_value.weight"][i], tensors["stand_in.own_value.bias"][i]
        part = (s["inputs"][:n] @ weight + bias)[:, None] * values
        residual = counts * (s["heads"][head, :n] - tensors["stand_in.bias"][i] - part) / counts.sum()
        # The residual is orthogonal to what its free numbers multiply: the constant, v and a(x) v.
        np.testing.assert_allclose(residual.sum(0), 0, atol=1e-5)
        np.testing.assert_allclose([(residual * values).sum(), (residual * part).sum()], 0, atol=1e-5)


@pytest.mark.parametrize("varies", [False, True], ids=["constant share", "share linear in the input"])
def test_heads_of_the_stand_ins_form_cost_nothing(varies):
    sample = make_sample(4, groups=2)
    # Inputs of equal variance in all directions, so that the ridge shrinks a share as one; each with v and
    # with -v, so that the vector b is found by its mean.
    generator = torch.Generator().manual_seed(1)
    half = torch.randn(sample.fitted // 2, 8, generator=generator)
    half = torch.linalg.qr(half - half.mean(0))[0] * len(half) ** 0.5
    sample.inputs[: sample.fitted] = torch.cat([half, half])
    sample.values[:, sample.fitted // 2 : sample.fitted] = -sample.values[:, : sample.fitted // 2]
    slope = 0.05 * varies * torch.randn(4, 8, generator=generator)
    share = (sample.inputs @ slope.T + torch.tensor([0.0, 0.2, 0.4, 0.6])).T[..., None]
    sample.heads = torch.randn(4, 1, 3, generator=generator) + share * sample.values
    whole, own = (LayerFitter(sample, [0], stand_in) for stand_in in (False, True))
    for dropped in (1, 3):
        assert own.fit(dropped).cost < 1e-7 * whole.fit(dropped).cost
    assert max(own.importance) < 1e-7 * min(whole.importance)


def test_importance_shares_the_heads_that_nothing_can_stand_in_for():
    sample = make_sample(5)
    sample.heads *= torch.tensor([1.0, 0.1, 3.0, 0.1, 2.0])[:, None, None]
    assert LayerFitter(sample, 2, stand_in=False).shared_heads == [2, 4]
    sample.heads[2] = 3 + 0.5 * sample.values[2]
    assert LayerFitter(sample, 2, stand_in=False).shared_heads == [2, 4]
    assert LayerFitter(sample, 2, stand_in=True).shared_heads == [0, 4]


def test_importance_shares_whole_groups():
    sample = make_sample(6, groups=2)
    sample.heads *= torch.tensor([2.0, 0.1, 3.0, 3.0, 0.1, 2.5])[:, None, None]
    assert LayerFitter(sample, 2, stand_in=False, unit=2).shared_heads == [2, 3]
    assert LayerFitter(sample, 4, stand_in=False, unit=2).shared_heads == [2, 3, 4, 5]


@pytest.mark.parametrize("stand_in", [False, True])
def test_held_out_tokens_change_the_cost_only(stand_in):
    sample = make_sample()
    other = dataclasses.replace(sample, inputs=sample.inputs.clone(), heads=sample.heads.clone())
    other.inputs[sample.fitted :] += 0.5
    other.heads[:, sample.fitted :] *= 2
    one, two = (LayerFitter(s, 1, stand_in).fit(2) for s in (sample, other))
    assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)
    assert one.cost != two.cost


@pytest.mark.parametrize("stand_in", [False, True])
@pytest.mark.parametrize("spoiled", ["heads", "values", "inputs"])
def test_what_does_not_vary_gives_finite_tensors(spoiled, stand_in):
    sample = make_sample()
    if spoiled == "inputs":
        sample.inputs[:] = 0.5
    else:
        getattr(sample, spoiled)[1] = 0
    fitter = LayerFitter(sample, 1, stand_in)
    for dropped in (1, 2, 3):
        fit = fitter.fit(dropped)
        assert np.isfinite(fit.cost) and all(tensor.isfinite().all() for tensor in fit.tensors.values())
