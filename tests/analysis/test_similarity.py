"""Similarity of heads against loops over pairs, and against the dense base."""

import itertools
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moh_llm.analysis.similarity import head_similarity, similarity_table
from moh_llm.modeling import is_routing_weight


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
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


def test_batches_do_not_matter(make_moh, batches, single_rows, unlike_plan) -> None:
    model = make_moh(**unlike_plan)
    one, other = head_similarity(model, batches), head_similarity(model, single_rows(batches))
    for name, mine in asdict(one).items():
        assert mine == pytest.approx(asdict(other)[name], abs=1e-7), name


@pytest.mark.parametrize("router_type", ["query_norm", "linear", "two_stage"])
def test_all_heads_on_is_the_dense_base(make_moh, batches, router_type) -> None:
    """Beside a LLaMA with the same weights, by its own attention weights and head outputs."""
    model = make_moh(num_shared_heads=1, num_active_heads=2, router_type=router_type)
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

    table = similarity_table(model, batches[:2])
    assert table.all_heads.patterns == pytest.approx([pattern_similarity(kept) for kept in rows], abs=1e-6)
    wanted = [output_similarity(layer, np.ones(layer.shape[:2])) for layer in outputs]
    assert table.all_heads.outputs == pytest.approx(wanted, abs=1e-6)
    assert table.moh == head_similarity(model, batches[:2])
    assert table.moh.mean_patterns != pytest.approx(table.all_heads.mean_patterns, abs=1e-4)
    assert table.moh.mean_outputs != pytest.approx(table.all_heads.mean_outputs, abs=1e-4)


def test_half_precision_is_summed_in_more(make_moh, batches) -> None:
    model = make_moh(dtype=torch.bfloat16, num_shared_heads=1, num_active_heads=3, router_score="weighted")
    model.set_attn_implementation("eager")
    patterns, heads, gates = ([], []), ([], []), ([], [])
    handles = []
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        handles += [
            attention.register_forward_hook(
                lambda module, args, output, kept=patterns[number]: kept.extend(
                    output[1].transpose(1, 2).flatten(0, 1).tolist()
                )
            ),
            attention.o_proj.register_forward_pre_hook(
                lambda module, args, kept=heads[number]: kept.extend(args[0].flatten(0, 1).double().numpy())
            ),
            attention.router.register_forward_hook(
                lambda module, args, output, kept=gates[number]: kept.extend(output[1].flatten(0, 1).numpy())
            ),
        ]
    found = head_similarity(model, batches)
    for handle in handles:
        handle.remove()
    assert found.patterns == pytest.approx([pattern_similarity(kept) for kept in patterns], abs=1e-6)
    wanted = [
        output_similarity([token.reshape(4, -1) for token in kept], np.stack(used) != 0)
        for kept, used in zip(heads, gates, strict=True)
    ]
    assert found.outputs == pytest.approx(wanted, abs=1e-6)


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


def test_the_backend_is_put_back(make_moh, batch) -> None:
    model = make_moh()
    before = model.config._attn_implementation
    assert before == "sdpa"
    head_similarity(model, [batch])
    assert model.config._attn_implementation == before
