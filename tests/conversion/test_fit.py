"""Routers and fallbacks against loops in float64, and the tensors against the cost that goes with them."""

import dataclasses

import numpy as np
import pytest
import torch

from moh_llm.conversion.fit import _EVERYWHERE, RIDGE, LayerFitter, LayerSample

ROUTER = {"router.routed.weight", "router.routed.bias"}
FALLBACK = {"fallback.own_value.weight", "fallback.own_value.bias", "fallback.bias"}


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


def half_squares(sample, tokens, group_size=1):
    """1/2 o^T M o of every group, o the sum of its heads' outputs, `[N, U]`."""
    s, size = doubles(vars(sample)), sample.heads.shape[-1]
    outputs = np.array(
        [[s["o_proj"][:, h * size :][:, :size] @ v[t] for h, v in enumerate(s["heads"])] for t in tokens]
    )
    outputs = np.array([[sum(row[h : h + group_size]) for h in range(0, len(row), group_size)] for row in outputs])
    return np.array([[o @ s["sensitivity"] @ o / 2 for o in row] for row in outputs])


def held_out_cost(sample, fit, routed, group_size=1):
    s, tensors, size = doubles(vars(sample)), doubles(fit.tensors), sample.heads.shape[-1]
    changes = {}  # of log p(y), by prediction
    for t in range(sample.fitted, len(s["inputs"])):
        x, error = s["inputs"][t], 0
        logits = tensors["router.routed.weight"] @ x + tensors["router.routed.bias"]
        for i in [
            row * group_size + h for row in np.argsort(logits)[: fit.dropped // group_size] for h in range(group_size)
        ]:
            missing = s["heads"][routed[i], t]
            if "fallback.bias" in tensors:
                share = tensors["fallback.own_value.weight"][i] @ x + tensors["fallback.own_value.bias"][i]
                missing = missing - (tensors["fallback.bias"][i] + share * s["values"][routed[i], t])
            error = error + s["o_proj"][:, routed[i] * size :][:, :size] @ missing
        prediction = (t - sample.fitted) // sample.together
        changes[prediction] = changes.get(prediction, 0) + s["gradients"][t - sample.fitted] @ error
    return np.mean([change**2 / 2 for change in changes.values()])


@pytest.mark.parametrize(("heads", "group_size"), [(1, 1), (4, 1), (9, 1), (4, 4), (9, 3)])
def test_importance_is_half_the_squared_output_of_a_unit_without_fallback(heads, group_size):
    sample = make_sample(heads, group_size)
    importance = LayerFitter(sample, 0, fallback=False, group_size=group_size).importance
    np.testing.assert_allclose(importance, half_squares(sample, range(sample.fitted), group_size).mean(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "group_size", "shared", "routed"), [(5, 1, [1, 3], [0, 2, 4]), (8, 2, [2, 3], [0, 2, 3])], ids=str
)
def test_router_is_the_ridge_of_the_log_error(heads, group_size, shared, routed):
    sample = make_sample(heads, group_size)
    tensors = LayerFitter(sample, shared, fallback=False, group_size=group_size).fit(group_size).tensors
    log_error = np.log(half_squares(sample, range(sample.fitted), group_size)[:, routed]) / 2
    weight, bias = ridge(sample.inputs[: sample.fitted].double().numpy(), log_error)
    np.testing.assert_allclose(tensors["router.routed.weight"], weight, rtol=1e-3, atol=1e-5)
    differences = (tensors["router.routed.bias"] - tensors["router.routed.bias"][0]).numpy()
    np.testing.assert_allclose(differences, bias - bias[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "shared", "group_size"), [(4, 2, [], 1), (9, 3, [0, 1, 8], 1), (9, 3, [3, 4, 5], 3)], ids=str
)
@pytest.mark.parametrize("together", [1, 5])
def test_cost_is_what_the_tensors_do_to_held_out_predictions(heads, groups, shared, group_size, fallback, together):
    sample = dataclasses.replace(make_sample(heads, groups), together=together)
    fitter = LayerFitter(sample, shared, fallback, group_size)
    routed = [head for head in range(heads) if head not in shared]
    assert fitter.shared_heads == shared
    for dropped in range(group_size, len(routed) + 1, group_size):
        fit = fitter.fit(dropped)
        assert len(fit.tensors["router.routed.weight"]) == len(routed) // group_size
        assert fit.dropped == dropped and fit.tensors.keys() == (ROUTER | FALLBACK if fallback else ROUTER)
        assert fit.cost == pytest.approx(held_out_cost(sample, fit, routed, group_size), rel=1e-4)


@pytest.mark.parametrize(("dropped", "group_size"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)])
def test_a_fallback_is_least_squares_over_the_tokens_that_drop_the_head(dropped, group_size):
    sample = make_sample(4 * group_size, groups=2)
    routed = [head for head in range(4 * group_size) if head // group_size != 2]
    tensors = doubles(
        LayerFitter(sample, [2 * group_size + h for h in range(group_size)], True, group_size).fit(dropped).tensors
    )
    s, n = doubles(vars(sample)), sample.fitted
    logits = s["inputs"][:n] @ tensors["router.routed.weight"].T + tensors["router.routed.bias"]
    ranks = (group_size * logits.argsort(1).argsort(1)).repeat(group_size, 1)
    for i, head in enumerate(routed):
        counts = (_EVERYWHERE + (ranks[:, i] < dropped))[:, None]
        values = s["values"][head, :n]
        weight, bias = tensors["fallback.own_value.weight"][i], tensors["fallback.own_value.bias"][i]
        part = (s["inputs"][:n] @ weight + bias)[:, None] * values
        residual = counts * (s["heads"][head, :n] - tensors["fallback.bias"][i] - part) / counts.sum()
        # The residual is orthogonal to what its free numbers multiply: the constant, v and a(x) v.
        np.testing.assert_allclose(residual.sum(0), 0, atol=1e-5)
        np.testing.assert_allclose([(residual * values).sum(), (residual * part).sum()], 0, atol=1e-5)


def test_importance_shares_the_heads_or_groups_that_no_fallback_replaces():
    sample = make_sample(5)
    sample.heads *= torch.tensor([1.0, 0.1, 3.0, 0.1, 2.0])[:, None, None]
    assert LayerFitter(sample, 2, fallback=False).shared_heads == [2, 4]
    sample.heads[2] = 3 + 0.5 * sample.values[2]
    assert LayerFitter(sample, 2, fallback=False).shared_heads == [2, 4]
    assert LayerFitter(sample, 2, fallback=True).shared_heads == [0, 4]

    sample = make_sample(6, groups=2)
    sample.heads *= torch.tensor([2.0, 0.1, 3.0, 3.0, 0.1, 2.5])[:, None, None]
    assert LayerFitter(sample, 2, fallback=False, group_size=2).shared_heads == [2, 3]
    assert LayerFitter(sample, 4, fallback=False, group_size=2).shared_heads == [2, 3, 4, 5]


def test_held_out_tokens_change_the_cost_only():
    sample = make_sample()
    other = dataclasses.replace(sample, inputs=sample.inputs.clone(), heads=sample.heads.clone())
    other.inputs[sample.fitted :] += 0.5
    other.heads[:, sample.fitted :] *= 2
    one, two = (LayerFitter(s, 1, True).fit(2) for s in (sample, other))
    assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)
    assert one.cost != two.cost


def test_what_does_not_vary_gives_finite_tensors():
    sample = make_sample()
    sample.inputs[:] = 0.5
    sample.heads[1], sample.values[2] = 0, 0
    fit = LayerFitter(sample, 1, fallback=True).fit(2)
    assert np.isfinite(fit.cost) and all(tensor.isfinite().all() for tensor in fit.tensors.values())


def test_a_layer_whose_heads_are_all_on_has_no_tensors():
    fitter = LayerFitter(make_sample(), 0, fallback=True, routes=False)
    assert fitter.fit(0).tensors == {} and {*fitter.fit(1).tensors} == FALLBACK
