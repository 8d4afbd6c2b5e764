"""Local attention's sample against a loop in float64, the distant token, and plans against trying each."""

import itertools
import math

import pytest
import torch
from layer_samples import make_sample

from moh_llm.conversion import local_fit
from moh_llm.conversion.local_fit import NO_TOKEN, STRIDE, LocalFitter, sample_local
from moh_llm.modeling.seen_moh import Seen

WINDOW, SINKS = 5, 2


@pytest.mark.parametrize(("length", "starts"), [(23, [0] * 23), (40, [0] * 9 + [9] * 31)])
def test_the_sample_is_a_loop(length, starts, monkeypatch):
    monkeypatch.setattr(local_fit, "_ROWS", 3)  # so that there are several blocks of rows
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, heads, length, 4, generator=generator) for heads in (4, 2, 2))
    places = torch.arange(length)[None], torch.tensor([starts])
    found = sample_local(queries, keys, values, Seen.from_positions(*places, WINDOW, SINKS), 0.5)
    for b, t, h in itertools.product(range(2), range(length), range(4)):
        row, document = b * length + t, range(starts[t], t + 1)
        scores = {j: (queries[b, h, t].double() @ keys[b, h // 2, j].double() * 0.5).item() for j in document}
        seen = [j for j in document if j > t - WINDOW or j < starts[t] + SINKS]
        hidden = [math.exp(scores[j]) for j in document if j not in seen]
        weights = torch.tensor([scores[j] for j in seen], dtype=torch.float64).softmax(0)
        expected = weights @ values[b, h // 2, seen].double()
        torch.testing.assert_close(found.outputs[h, row].double(), expected, atol=1e-5, rtol=1e-5)
        assert found.near[row, h] == pytest.approx(math.log(sum(math.exp(scores[j]) for j in seen)), abs=1e-4)
        assert found.hidden[row] == max(1, len(hidden))
        if t % STRIDE:
            assert found.far[row, h].isnan()
        else:
            assert found.far[row, h] == pytest.approx(math.log(sum(hidden)) if hidden else -math.inf, abs=1e-4)


def test_the_distant_token_is_found():
    sample, value = make_sample(spread=0.0)
    fitter = LocalFitter(sample, router="none")
    torch.testing.assert_close(fitter.value, value, atol=0.02, rtol=0.02)
    assert max(fitter.importance) < 1e-3


def test_a_head_that_it_harms_has_none():
    """Its outputs are those of local attention, whatever the weight of what is out of sight."""
    sample, _ = make_sample()
    sample.heads[1] = sample.local.outputs[1]
    fitter = LocalFitter(sample, router="none")
    assert fitter.score_bias[1] == NO_TOKEN and fitter.score_weight[1].eq(0).all() and fitter.value[1].eq(0).all()
    assert fitter.importance[1] == 0 and fitter.score_bias[0] > NO_TOKEN


def missing(sample, fit, t, head, row):
    """What a head lacks of its output where its fallback, the `row`-th, takes its place."""
    weight, bias = (fit.tensors[f"fallback.distant_score.{name}"][row] for name in ("weight", "bias"))
    score = weight @ sample.inputs[t] + bias
    share = (score + sample.local.hidden[t].log() - sample.local.near[t, head]).sigmoid()
    fallback = (1 - share) * sample.local.outputs[head, t] + share * fit.tensors["fallback.distant_value"][row]
    return sample.heads[head, t] - fallback


def cost(fitter, sample, fit, router):
    """1/2 (g^T e)^2 over held-out tokens, a token and a head at a time, by what the tensors say."""
    held_out, size = range(sample.fitted, len(sample.inputs)), sample.heads.shape[-1]
    heads = range(len(sample.heads))
    routed = [head for head in heads if head not in fit.shared_heads and head not in fit.never_on_heads]
    others = [head for head in heads if head not in fit.shared_heads]
    total = 0.0
    for t in held_out:
        x, error = sample.inputs[t], torch.zeros(sample.inputs.shape[1])
        off = others if router == "none" else list(fit.never_on_heads)
        if router != "none" and routed:
            logits = fit.tensors["router.routed.weight"] @ x + fit.tensors["router.routed.bias"]
            off += [routed[i] for i in logits.argsort()[: fit.dropped - len(fit.never_on_heads)].tolist()]
        for head in off:
            lost = missing(sample, fit, t, head, others.index(head))
            error = error + sample.o_proj[:, head * size :][:, :size] @ lost
        total += float((sample.gradients[t - sample.fitted] @ error) ** 2 / 2)
    return total / len(held_out)


@pytest.mark.parametrize("router", ["none", "linear"])
def test_cost_is_what_the_tensors_do_to_held_out_tokens(router):
    sample, _ = make_sample()
    fitter = LocalFitter(sample, router)
    for dropped in range(5):
        fit = fitter.fit(dropped)
        assert fit.dropped == dropped and len(fit.shared_heads) <= 4 - dropped and len(fit.never_on_heads) <= dropped
        assert fit.cost == pytest.approx(cost(fitter, sample, fit, router), rel=1e-3, abs=1e-9)
        if router == "none":
            ranked = sorted(range(4), key=lambda head: -fitter.importance[head])
            assert sorted(fit.shared_heads) == sorted(ranked[: 4 - dropped])


@pytest.mark.parametrize("dropped", [1, 2, 3])
def test_a_threshold_drops_as_many_on_the_mean(dropped):
    """Over all tokens, few from one and many from another, and at less cost than as many from each."""
    sample, _ = make_sample()
    noise = torch.randn(sample.heads.shape, generator=torch.Generator().manual_seed(1))
    sample.heads += noise * sample.inputs[:, :4].exp().T[..., None]  # how much a head matters, the input tells
    fit = LocalFitter(sample, "threshold", []).fit(dropped)
    logits = sample.inputs @ fit.tensors["router.routed.weight"].T + fit.tensors["router.routed.bias"]
    off = (logits <= 0).sum(1).float()
    assert off.mean() == pytest.approx(dropped, abs=0.02) and off.std() > 0.3
    least, most = logits[logits > 0].min().item(), logits[logits <= 0].max().item()
    assert least == pytest.approx(-most, rel=0.1)  # no token is on the edge
    top_k = LocalFitter(sample, "linear", []).fit(dropped)
    torch.testing.assert_close(fit.tensors["router.routed.weight"], top_k.tensors["router.routed.weight"])


def test_the_cost_of_a_threshold_is_that_of_as_many_drops_on_held_out_tokens():
    sample, _ = make_sample()
    fit = LocalFitter(sample, "threshold", []).fit(2)
    logits = sample.inputs[sample.fitted :] @ fit.tensors["router.routed.weight"].T
    logits = logits + fit.tensors["router.routed.bias"]
    off = torch.zeros_like(logits).flatten()
    off[logits.flatten().argsort()[: 2 * len(logits)]] = 1
    off = off.view_as(logits)
    total = 0.0
    for t, own in enumerate(off, sample.fitted):
        error = torch.zeros(sample.inputs.shape[1])
        for head in own.nonzero()[:, 0].tolist():
            error = error + sample.o_proj[:, 3 * head : 3 * head + 3] @ missing(sample, fit, t, head, head)
        total += float((sample.gradients[t - sample.fitted] @ error) ** 2 / 2)
    assert fit.cost == pytest.approx(total / len(off), rel=1e-3)


def test_the_plan_is_the_best_of_those_tried():
    sample, _ = make_sample()
    mixed, fixed, routed = LocalFitter(sample, "linear"), LocalFitter(sample, "none"), LocalFitter(sample, "linear", [])
    for dropped in range(1, 4):
        assert mixed.fit(dropped).cost <= min(fixed.fit(dropped).cost, routed.fit(dropped).cost) + 1e-9
    assert routed.fit(2).shared_heads == routed.fit(2).never_on_heads == []


def test_groups_are_switched_as_one():
    sample, _ = make_sample()
    fit = LocalFitter(sample, "linear", group_size=2).fit(2)
    assert [sorted(fit.shared_heads), sorted(fit.never_on_heads)] in ([[0, 1], [2, 3]], [[2, 3], [0, 1]], [[], []])
    assert LocalFitter(sample, "none", group_size=2).fit(4).never_on_heads == [0, 1, 2, 3]
