"""Measures of heads against loops over tokens and heads, over every score, over pairs, and singular values."""

import itertools

import numpy as np
import pytest
import torch

from moh_llm.analysis import measures
from moh_llm.analysis.measures import BINS, KINDS, QUANTILES, head_similarity, measure_heads, similarity_table
from moh_llm.errors import UserError


def measure(model, batches) -> dict:
    return measure_heads(model, {"text": batches})


def check_scores(found, scores: list[float]) -> None:
    if not scores:
        assert found is None
        return
    bins = [0] * BINS
    for score in scores:
        bins[min(int(score * BINS), BINS - 1)] += 1
    assert found["histogram"] == bins
    wanted = np.quantile(scores, QUANTILES, method="inverted_cdf")
    np.testing.assert_allclose(found["quantiles"], wanted, atol=1e-4, rtol=0)


def rank_of(features: np.ndarray) -> dict[str, int]:
    width = features.shape[1]
    if not width or not features.any():
        return {"width": width, "energy": 0}
    squares = np.linalg.svd(features, compute_uv=False) ** 2
    energy = next(n for n in range(1, len(squares) + 1) if squares[:n].sum() >= 0.99 * squares.sum())
    return {"width": width, "energy": energy}


def test_load_scores_and_ranks_are_those_of_loops(make_moh, batches, recompute, plan) -> None:
    model = make_moh(**plan)
    found = measure(model, batches)
    config, heads = model.config, range(model.config.num_attention_heads)
    assert found["head_load"]["tokens"] == found["feature_rank"]["tokens"] == 37
    assert found["head_load"]["shared_heads"] == config.shared_heads_per_layer
    for layer, naive in enumerate(recompute(model, batches)):
        counts = [sum(1 for token in naive.gates if token[head] != 0) for head in heads]
        assert found["head_load"]["load"][layer] == [count / 37 for count in counts]

        shared, routed = config.shared_heads_per_layer[layer], config.routed_heads(layer)
        tokens, scores = list(zip(naive.scores, naive.gates, strict=True)), found["routing_scores"]["layers"][layer]
        check_scores(scores["shared"], [s[h] for s, _ in tokens for h in shared if s[h] is not None])
        check_scores(scores["routed"], [s[h] for s, _ in tokens for h in routed])
        check_scores(scores["selected"], [s[h] for s, gate in tokens for h in routed if gate[h] != 0])
        assert (scores["shared"] is None) == (config.router_type != "two_stage")

        for kind, ids in (("shared", shared), ("routed", routed)):
            assert found["feature_rank"][kind][layer] == rank_of(naive.heads[:, ids].reshape(37, -1))


def test_texts_are_measured_apart_and_together(make_moh, batches, unlike_plan, monkeypatch) -> None:
    """One row at a time, and features in small parts, give the same."""
    model = make_moh(**unlike_plan)
    rows = [
        {name: tensor[row : row + 1] for name, tensor in batch.items()}
        for batch in batches
        for row in range(len(batch["input_ids"]))
    ]
    monkeypatch.setattr(measures, "_ROWS", 4)
    one, other = measure(model, rows[:2]), measure(model, rows[2:])
    both = measure_heads(model, {"one": rows[:2], "other": rows[2:]})
    whole = measure(model, batches)
    for key in ("head_load", "routing_scores", "feature_rank"):
        assert both[key] == whole[key]
    last = both["head_load_by_text"]["layer"]
    assert both["head_load_by_text"]["shared_heads"] == whole["head_load"]["shared_heads"][last]
    for name, alone in (("one", one), ("other", other)):
        assert both["head_load_by_text"]["load"][name] == alone["head_load"]["load"][last]
        assert both["routing_scores_by_text"]["texts"][name] == alone["routing_scores"]["layers"][last]
    assert both["head_load_by_text"]["tokens"] == {
        "one": one["head_load"]["tokens"],
        "other": other["head_load"]["tokens"],
    }


def test_certain_routers_fill_the_last_bin(make_moh, batch) -> None:
    model = make_moh(num_shared_heads=2, num_active_heads=3, router_type="linear", dtype=torch.bfloat16)
    with torch.no_grad():
        for router in model.routers:
            router.routed.weight.zero_()
            router.routed.bias.copy_(torch.tensor([800.0, -800.0]))
    for layer in measure(model, [batch])["routing_scores"]["layers"]:
        assert layer["selected"]["histogram"][-1] == 27 == sum(layer["selected"]["histogram"])
        assert layer["routed"]["histogram"][0] == 27 and tuple(layer) == KINDS


def test_half_precision_is_summed_in_float64(make_moh, batches) -> None:
    model = make_moh(dtype=torch.bfloat16, num_shared_heads=1, num_active_heads=3, shared_heads=[[1], [3]])
    kept: tuple[list, list] = ([], [])
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, rows=rows: rows.append(args[0].flatten(0, 1).double().numpy())
        )
        for layer, rows in zip(model.model.layers, kept, strict=True)
    ]
    found = measure(model, batches)["feature_rank"]
    for handle in handles:
        handle.remove()
    for layer, shared in enumerate((1, 3)):
        heads = np.concatenate(kept[layer]).reshape(37, 4, -1)
        others = [head for head in range(4) if head != shared]
        assert found["shared"][layer] == rank_of(heads[:, shared])
        assert found["routed"][layer] == rank_of(heads[:, others].reshape(37, -1))


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
