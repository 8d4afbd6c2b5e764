"""The load of heads against loops over tokens and heads."""

import pytest
import torch

from moh_llm.analysis.heads import measure_load
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
