"""Plans for a time of attention: what heads of each kind cost, the plans that are offered, and the command."""

import itertools
import json

import pytest
import torch
from layer_samples import make_sample
from transformers import LlamaConfig

from moh_llm.conversion import convert as conversion
from moh_llm.conversion.attention_time import AttentionTimes, _layer, fit_times, measure_attention, timed_kinds
from moh_llm.conversion.local_fit import LocalFitter
from moh_llm.conversion.plan import PlanOptions
from moh_llm.modeling.configuration_moh_llama import MoHLlamaConfig

TIMES = AttentionTimes(heads=4, constant=0.1, shared=0.2, routed=0.03, on=0.21)


@pytest.mark.parametrize(("heads", "group_size"), [(9, 1), (9, 3), (32, 1), (32, 4), (14, 7), (4, 1), (2, 1), (4, 4)])
@pytest.mark.parametrize("routes", [True, False])
def test_a_linear_law_is_found(heads, group_size, routes):
    law = AttentionTimes(heads, 0.1, 0.07, 0.01, 0.08)
    kinds = timed_kinds(heads, group_size, routes)
    found = fit_times(heads, {kind: law.constant + 0.07 * kind[0] + 0.01 * kind[1] + 0.08 * kind[2] for kind in kinds})
    for kind in kinds:
        assert found.share(*kind) == pytest.approx(law.share(*kind))
        assert all(count % group_size == 0 for count in kind) and kind[2] <= kind[1] <= heads - kind[0]
    assert found.share(heads, 0, 0) == 1.0


def test_no_head_saves_time_by_being_on():
    found = fit_times(9, {(0, 0, 0): 0.5, (3, 0, 0): 0.4, (6, 0, 0): 0.3, (0, 9, 4): 0.6, (0, 9, 2): 0.55})
    assert min(found.constant, found.shared, found.routed, found.on) >= 0 and found.shared == 0


@pytest.mark.parametrize("router", ["threshold", "none"])
def test_timed_layers_have_as_many_heads_on(router):
    base = LlamaConfig(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, num_hidden_layers=3)
    plan = PlanOptions(router=router, fallback="local", local_window=8, local_sinks=2, context=64)
    for kind in [(6, 0, 0), *timed_kinds(6, 1, router != "none")]:
        layer, gates = _layer(base, plan, kind), []
        router_module = layer.layers[0].self_attn.router
        router_module.register_forward_hook(lambda _, args, output, gates=gates: gates.append(output[1]))
        layer(inputs_embeds=torch.randn(1, 64, 48))
        (gate,) = gates
        assert (gate[0, 10:].sum(-1) == kind[0] + kind[2]).all()
        assert int((gate[0, 10:] == 1).all(0).sum()) >= kind[0]
    times = measure_attention(base, plan, torch.float32, torch.device("cpu"), rounds=1)
    assert times.heads == 6 and times.constant >= 0


@pytest.mark.parametrize("router", ["none", "linear", "threshold"])
def test_plans_are_those_that_no_other_beats(router):
    """At any price of time one of them is the best of all that the fit compares."""
    sample, _ = make_sample()
    fitter = LocalFitter(sample, router)
    plans = fitter.fits_by_time(TIMES)
    assert (plans[0].time, plans[0].cost, plans[0].dropped) == (1.0, 0.0, 0)
    every = [(1.0, 0.0)]
    for dropped in range(1, 5):
        for shared, local in fitter._plans(dropped):
            time = TIMES.share(len(shared), 4 - len(shared) - len(local), 4 - dropped - len(shared))
            every.append((time, fitter._cost(shared, local, dropped)))
    for price in torch.logspace(-3, 4, 200).tolist():
        best = min(cost + price * time for time, cost in every)
        assert min(plan.cost + price * plan.time for plan in plans) == pytest.approx(best)
    for slow, fast in itertools.pairwise(plans):
        assert slow.time > fast.time and slow.cost < fast.cost
    for plan in plans[1:]:
        routed = 4 - len(plan.shared_heads) - len(plan.local_heads)
        on = 4 - plan.dropped - len(plan.shared_heads)
        assert plan.time == pytest.approx(TIMES.share(len(plan.shared_heads), routed, on))
        assert ("router.routed.weight" in plan.tensors) == (routed > 0)


@pytest.fixture(scope="module")
def base(make_llama):
    return make_llama(max_position_embeddings=4096, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("router", ["threshold", "none"])
def test_the_budget_is_a_time(base, convert, tmp_path, monkeypatch, capsys, router):
    asked = []
    monkeypatch.setattr(conversion, "measure_attention", lambda *args: asked.append(args) or TIMES)
    flags = ["--attention-time", "0.6", "--context", "2048", "--router", router, "--verify", "none"]
    assert convert(base, tmp_path / "moh", *flags) == 0
    assert len(asked) == 1 and asked[0][1].context == 2048
    config = MoHLlamaConfig.from_pretrained(tmp_path / "moh")
    heads = zip(config.shared_heads_per_layer, config.active_heads_per_layer, strict=True)
    shares = [
        TIMES.share(len(shared), len(config.routed_heads(layer)), active - len(shared))
        for layer, (shared, active) in enumerate(heads)
    ]
    record = json.loads((tmp_path / "moh" / "conversion.json").read_text())
    assert record["plan"]["attention_time"] == pytest.approx(sum(shares) / len(shares), abs=1e-4)
    assert 0.1 <= record["plan"]["attention_time"] <= 0.6
    said = f"Attention at 2048 tokens is asked to take {record['plan']['attention_time']:.3f} of the base's time"
    assert said in " ".join(capsys.readouterr().out.split())
    costs = record["calibration"]["estimated_kl_by_drops"]
    assert len(costs) == 2 and costs[0]["0"] == 0.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--attention-time", "0.05"], "--attention-time 0.05 is less than the 0.100 that attention takes here"),
        (["--attention-time", "1.5"], "--attention-time 1.5 must be above 0 and at most 1"),
        (["--attention-time", "0.5", "--keys", "0.5"], "give --keys or --attention-time, not both"),
        (["--attention-time", "0.5", "--fallback", "value"], "add --fallback local"),
        (["--attention-time", "0.5", "--num-shared-heads", "1"], "drop --preset and --num-shared-heads"),
        (["--attention-time", "0.5", "--budgets", "even"], "drop --budgets even"),
    ],
)
def test_what_cannot_be_followed_is_named(base, convert, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(conversion, "measure_attention", lambda *args: TIMES)
    assert convert(base, tmp_path / "moh", "--context", "2048", *flags) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "moh").exists()
