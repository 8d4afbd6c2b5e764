"""How much text the quick start reads on fast and slow machines."""

import pytest
import torch
from transformers import AutoConfig

from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.evaluation.suite import load_suite
from moh_llm.quickstart.budget import (
    BENCHMARKS,
    FIXED,
    LEAST,
    SEQUENCES,
    SOURCES,
    Speed,
    choose_amounts,
    fit_rest,
    measure_speed,
)
from moh_llm.quickstart.run import show_plan
from moh_llm.records.model import read_weight_map

SLOW, FAST = Speed(1 / 100, 1 / 100), Speed(1 / 30000, 1 / 30000)


def total(amounts, speed):
    return sum(amounts.seconds(speed).values())


@pytest.mark.parametrize("speed", [Speed(1 / rate, 1.1 / rate) for rate in (300, 3000, 30000)])
@pytest.mark.parametrize("minutes", [5, 60])
def test_it_takes_the_time_it_may(speed, minutes):
    amounts = choose_amounts(speed, 60 * minutes, 8192)
    assert 0.6 * 60 * minutes < total(amounts, speed) <= 54 * minutes
    for name, least in LEAST.items():
        assert getattr(amounts, name) >= least
    assert amounts.calibration % amounts.context == amounts.heldout % amounts.context == 0
    assert amounts.steps * SEQUENCES * amounts.context == amounts.tuning and amounts.steps >= 2
    assert min(amounts.calibration, amounts.heldout) >= SOURCES * amounts.context


def test_a_faster_machine_reads_longer_sequences_up_to_those_of_the_base():
    contexts = [choose_amounts(Speed(1 / r, 1 / r), 300, 8192).context for r in (300, 1000, 3000, 10000, 30000)]
    assert contexts == sorted(contexts) and contexts[0] <= 512 and contexts[-1] == 8192
    assert choose_amounts(FAST, 3600, 1000).context == 1000


def test_the_smallest_run_says_that_it_needs_longer():
    amounts = choose_amounts(SLOW, 60, 8192)
    assert (amounts.calibration, amounts.heldout, amounts.tuning) == tuple(LEAST.values())
    said = show_plan(amounts, SLOW, 1, 55, "a CPU, float32")
    assert "smallest run" in said and "--minutes 1" in said
    assert "smallest run" not in show_plan(choose_amounts(FAST, 300, 8192), FAST, 5, 290, "a GPU, bfloat16")


def test_what_comes_later_fits_in_what_is_left():
    speed = Speed(1 / 400, 1 / 400)
    amounts = choose_amounts(speed, 600, 2048)
    steps = ("tune", "evaluate", "compare")
    later = fit_rest(amounts, speed, 320, steps)
    seconds = later.seconds(speed)
    assert seconds["tune"] + seconds["evaluate"] + seconds["compare"] <= 288
    assert LEAST["heldout"] <= later.heldout < amounts.heldout and later.context == amounts.context
    assert 0 < later.tuning < amounts.tuning
    least = fit_rest(amounts, speed, 1, steps)
    assert (least.steps, least.items) == (2, 2)
    assert fit_rest(amounts, speed, 600, steps[1:]) == amounts
    assert fit_rest(amounts, speed, FIXED["evaluate"], steps[1:]).tuning == amounts.tuning


def test_the_items_are_those_of_the_suite():
    assert tuple(benchmark.items for benchmark in load_suite("smoke").benchmarks) == BENCHMARKS


def test_a_layer_and_the_head_are_what_is_timed(make_llama, monkeypatch):
    """With a clock that counts modules' calls, a model of four layers takes four layers and a head."""
    folder = make_llama(num_hidden_layers=4)
    base = LayerwiseModel(
        folder, read_weight_map(folder)[1], AutoConfig.from_pretrained(folder), torch.float32, torch.device("cpu")
    )
    clock = [0.0]

    def layer(number):
        built = LayerwiseModel.layer(base, number)
        built.layers[0].register_forward_hook(lambda *_: clock.__setitem__(0, clock[0] + 10))
        built.layers[0].register_full_backward_hook(lambda *_: clock.__setitem__(0, clock[0] + 20))
        return built

    def head():
        built = LayerwiseModel.head(base)
        built.register_forward_hook(lambda *_: clock.__setitem__(0, clock[0] + 3))
        return built

    monkeypatch.setattr(base, "layer", layer)
    monkeypatch.setattr(base, "head", head)
    monkeypatch.setattr("moh_llm.quickstart.budget.time.perf_counter", lambda: clock[0])
    assert measure_speed(base, tokens=1) == Speed(4 * 10 + 3, 4 * 20 + 3)
