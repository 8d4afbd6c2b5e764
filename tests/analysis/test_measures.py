"""Measures of heads against loops over tokens and heads, and over pairs."""

import itertools

import numpy as np
import pytest
import torch

from moh_llm.analysis.record import head_similarity, measure_load, similarity_table
from moh_llm.errors import UserError


def measure(model, batches) -> dict:
    return measure_load(model, {"text": batches})


def test_loads_are_those_of_loops(make_moh, batches, recompute, plan) -> None:
    model = make_moh(**plan)
    found = measure(model, batches)
    config, heads = model.config, range(model.config.num_attention_heads)
    assert found["head_load"]["tokens"] == 37
    assert found["head_load"]["shared_heads"] == config.shared_heads_per_layer
    for layer, naive in enumerate(recompute(model, batches)):
        counts = [sum(1 for token in naive.gates if token[head] != 0) for head in heads]
        assert found["head_load"]["load"][layer] == [count / 37 for count in counts]


def test_texts_are_measured_apart_and_together(make_moh, batches, unlike_plan) -> None:
    model = make_moh(**unlike_plan)
    rows = [
        {name: tensor[row : row + 1] for name, tensor in batch.items()}
        for batch in batches
        for row in range(len(batch["input_ids"]))
    ]
    one, other = measure(model, rows[:2]), measure(model, rows[2:])
    both = measure_load(model, {"one": rows[:2], "other": rows[2:]})
    whole = measure(model, batches)
    assert both["head_load"] == whole["head_load"]
    last = both["head_load_by_text"]["layer"]
    assert both["head_load_by_text"]["shared_heads"] == whole["head_load"]["shared_heads"][last]
    for name, alone in (("one", one), ("other", other)):
        assert both["head_load_by_text"]["load"][name] == alone["head_load"]["load"][last]
    assert both["head_load_by_text"]["tokens"] == {
        "one": one["head_load"]["tokens"],
        "other": other["head_load"]["tokens"],
    }


def test_numbers_that_are_not_finite_are_refused(make_moh, batch) -> None:
    model = make_moh()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="finite numbers; dtype float32"):
        measure(model, [batch])


def pattern_similarity(patterns) -> float | None:
    """1 - 0.5 * E|A - A'|_1 over tokens' attention rows `[H, keys]`."""
    values = [
        1 - 0.5 * sum(abs(float(a) - float(b)) for a, b in zip(one, other, strict=True))
        for rows in patterns
        for one, other in itertools.combinations(rows, 2)
    ]
    return sum(values) / len(values) if values else None


def output_similarity(heads, on) -> float | None:
    """Mean cosine over pairs that are both on, of `[N, H, D]` and `[N, H]`."""
    values = [
        float(a @ b) / float(np.sqrt(a @ a) * np.sqrt(b @ b))
        for outputs, used in zip(heads, on, strict=True)
        for a, b in itertools.combinations([out for out, is_on in zip(outputs, used, strict=True) if is_on], 2)
    ]
    return sum(values) / len(values) if values else None


def mean(values) -> float | None:
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def test_similarities_are_those_of_loops_over_pairs(make_moh, batches, recompute, plan) -> None:
    model = make_moh(**plan)
    found = head_similarity(model, batches)
    layers = recompute(model, batches)
    patterns = [pattern_similarity(layer.patterns) for layer in layers]
    outputs = [output_similarity(layer.heads, layer.gates != 0) for layer in layers]
    assert found["patterns"] == pytest.approx(patterns, abs=1e-6)
    assert [value is None for value in found["outputs"]] == [value is None for value in outputs]
    for mine, wanted in zip(found["outputs"], outputs, strict=True):
        assert wanted is None or mine == pytest.approx(wanted, abs=1e-5)
    assert found["mean_patterns"] == pytest.approx(mean(patterns), abs=1e-6)
    assert found["mean_outputs"] == pytest.approx(mean(outputs), abs=1e-5)


def test_similarities_are_also_those_with_all_heads_on(make_moh, batches) -> None:
    model = make_moh(num_shared_heads=1, num_active_heads=2)
    moh, all_heads = similarity_table(model, batches).values()
    assert moh == head_similarity(model, batches) != all_heads
    with model.all_heads_active():
        assert all_heads == head_similarity(model, batches)
