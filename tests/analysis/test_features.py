"""Similarity of heads against loops over pairs and the dense base; feature rank against singular values."""

import itertools
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moh_llm.analysis.features import Rank, feature_rank, head_similarity, similarity_table
from moh_llm.records.tensors import is_routing_weight


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
    assert found.patterns == pytest.approx(patterns, abs=1e-6)
    assert [value is None for value in found.outputs] == [value is None for value in outputs]
    for mine, wanted in zip(found.outputs, outputs, strict=True):
        assert wanted is None or mine == pytest.approx(wanted, abs=1e-5)
    assert found.mean_patterns == pytest.approx(mean(patterns), abs=1e-6)
    assert found.mean_outputs == pytest.approx(mean(outputs), abs=1e-5)
    assert all(0 < value < 1 for value in found.patterns)


def test_all_heads_on_is_the_dense_base(make_moh, batches) -> None:
    """Beside a LLaMA with the same weights, by its own attention weights and head outputs."""
    model = make_moh(num_shared_heads=1, num_active_heads=2)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = {name: getattr(model.config, name) for name in (*names, "num_key_value_heads", "rms_norm_eps")}
    dense = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="eager")).double().eval()
    dense.load_state_dict({name: t for name, t in model.state_dict().items() if not is_routing_weight(name)})
    rows, heads = ([], []), ([], [])
    for layer, kept in zip(dense.model.layers, heads, strict=True):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args, kept=kept: kept.append(args[0]))
    for batch in batches[:2]:
        with torch.no_grad():
            inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
            attentions = dense(**inputs, use_cache=False, output_attentions=True).attentions
        for kept, weights in zip(rows, attentions, strict=True):
            kept.extend(weights.transpose(1, 2).flatten(0, 1).tolist())
    outputs = [torch.cat([part.flatten(0, 1) for part in kept]).unflatten(-1, (4, -1)).numpy() for kept in heads]

    moh, all_heads = similarity_table(model, batches[:2]).values()
    assert all_heads.patterns == pytest.approx([pattern_similarity(kept) for kept in rows], abs=1e-6)
    wanted = [output_similarity(layer, np.ones(layer.shape[:2])) for layer in outputs]
    assert all_heads.outputs == pytest.approx(wanted, abs=1e-6)
    assert moh == head_similarity(model, batches[:2])
    assert moh.mean_patterns != pytest.approx(all_heads.mean_patterns, abs=1e-4)
    assert moh.mean_outputs != pytest.approx(all_heads.mean_outputs, abs=1e-4)


def test_heads_that_are_copies_are_alike(make_moh, batch) -> None:
    model = make_moh(num_key_value_heads=1, num_shared_heads=1, num_active_heads=3, router_type="linear")
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.q_proj.weight
            weight.copy_(weight[:8].repeat(4, 1))
    found = head_similarity(model, [batch])
    assert found.patterns == pytest.approx([1, 1]) and found.outputs == pytest.approx([1, 1])


def test_one_head_has_no_pairs(make_moh, batch) -> None:
    plan = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_shared_heads": 1, "num_active_heads": 1}
    found = head_similarity(make_moh(**plan), [batch])
    assert found.patterns == found.outputs == [None, None]
    assert found.mean_patterns is None and found.mean_outputs is None


def test_half_precision_is_summed_in_more(make_moh, batches) -> None:
    fields = {"num_shared_heads": 1, "num_active_heads": 4}
    exact, rough = (head_similarity(make_moh(dtype=d, **fields), batches) for d in (torch.float64, torch.bfloat16))
    assert rough.patterns == pytest.approx(exact.patterns, abs=5e-3)
    assert rough.outputs == pytest.approx(exact.outputs, abs=2e-2)


def rank_of(features: np.ndarray) -> Rank:
    width = features.shape[1]
    if not width or not features.any():
        return Rank(width, 0, 0)
    values = np.linalg.svd(features, compute_uv=False)
    energy = next(n for n in range(1, len(values) + 1) if (values[:n] ** 2).sum() >= 0.99 * (values**2).sum())
    return Rank(width, energy, sum(1 for value in values if value > values[0] * width * 2.0**-23))


def test_ranks_are_those_of_the_singular_values(make_moh, batches, recompute, plan) -> None:
    model = make_moh(**plan)
    found = feature_rank(model, batches)
    assert found.tokens == 37
    every: dict[str, list[Rank]] = {"shared": [], "routed": []}
    for layer, naive in enumerate(recompute(model, batches)):
        shared = model.config.shared_heads_per_layer[layer]
        routed = model.config.routed_heads(layer)
        for kind, ids in (("shared", shared), ("routed", routed)):
            every[kind].append(rank_of(naive.heads[:, ids].reshape(37, -1)))
    assert found.shared == every["shared"] and found.routed == every["routed"]
    for kind, total in (("shared", found.shared_sum), ("routed", found.routed_sum)):
        assert asdict(total) == {key: sum(asdict(one)[key] for one in every[kind]) for key in asdict(total)}


def test_values_of_low_rank_are_found(make_moh) -> None:
    """Each head's features span what its values do: 2 dimensions for layer 0's, all 8 for layer 1's."""
    model = make_moh(
        dtype=torch.float32, num_key_value_heads=4, num_shared_heads=1, num_active_heads=3, shared_heads=[[2], [2]]
    )
    with torch.no_grad():
        values = model.model.layers[0].self_attn.v_proj.weight
        values.copy_(torch.cat([torch.randn(8, 2) @ torch.randn(2, 32) for _ in range(4)]))
    ids = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    text = [{"input_ids": ids, "position_ids": torch.arange(32).expand(4, -1)}]
    found = feature_rank(model, text)
    assert [one.width for one in found.shared] == [8, 8] and [one.width for one in found.routed] == [24, 24]
    assert [one.numerical for one in found.shared] == [2, 8] and [one.numerical for one in found.routed] == [6, 24]
    assert all(one.energy <= one.numerical for one in [*found.shared, *found.routed])


def test_heads_that_are_never_on_have_no_rank(make_moh, batch) -> None:
    model = make_moh(num_shared_heads=2, num_active_heads=2)
    found = feature_rank(model, [batch])
    assert found.routed == [Rank(16, 0, 0)] * 2 and found.routed_sum == Rank(32, 0, 0)
    with model.all_heads_active():
        assert feature_rank(model, [batch]).routed[0].numerical > 0


def test_half_precision_is_summed_in_float64(make_moh, batches) -> None:
    model = make_moh(dtype=torch.bfloat16, num_shared_heads=1, num_active_heads=3, shared_heads=[[1], [3]])
    kept: tuple[list, list] = ([], [])
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, rows=rows: rows.append(args[0].flatten(0, 1).double().numpy())
        )
        for layer, rows in zip(model.model.layers, kept, strict=True)
    ]
    found = feature_rank(model, batches)
    for handle in handles:
        handle.remove()
    for layer, shared in enumerate((1, 3)):
        heads = np.concatenate(kept[layer]).reshape(37, 4, -1)
        others = [head for head in range(4) if head != shared]
        assert found.shared[layer] == rank_of(heads[:, shared])
        assert found.routed[layer] == rank_of(heads[:, others].reshape(37, -1))
