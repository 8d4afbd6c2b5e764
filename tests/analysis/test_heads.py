"""Head load against counting gates one by one."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from moh_llm.analysis.heads import head_load, head_load_by_text, load_balance
from moh_llm.errors import UserError


def test_load_is_that_of_a_count(make_moh, batches, recompute, plan) -> None:
    model = make_moh(**plan)
    found = head_load(model, batches)
    assert found.tokens == 37
    assert found.shared_heads == model.config.shared_heads_per_layer
    for layer, naive in enumerate(recompute(model, batches)):
        heads = range(model.config.num_attention_heads)
        counts = [sum(1 for token in naive.gates if token[head] != 0) for head in heads]
        assert found.load[layer] == [count / 37 for count in counts]
        routed = [counts[head] for head in heads if head not in found.shared_heads[layer]]
        routed = routed[:: model.config.heads_per_group]  # a group's heads have one load, and are balanced as one
        if len(routed) < 2 or not sum(routed):
            assert found.balance[layer] is None
        else:
            entropy = sum(-n / sum(routed) * math.log(n / sum(routed)) for n in routed if n)
            assert found.balance[layer] == pytest.approx(entropy / math.log(len(routed)))
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


def test_batches_do_not_matter(make_moh, batches, single_rows, unlike_plan) -> None:
    model = make_moh(**unlike_plan)
    assert head_load(model, batches) == head_load(model, single_rows(batches))


def test_all_heads_on_is_a_load_of_one(make_moh, batches, plan) -> None:
    model = make_moh(**plan)
    before = head_load(model, batches)
    with model.all_heads_active():
        found = head_load(model, batches)
    assert found.load == [[1.0] * model.config.num_attention_heads] * 2
    assert all(balance is None or balance == pytest.approx(1) for balance in found.balance)
    assert before.load != found.load and head_load(model, batches) == before


def test_half_precision_is_counted_as_it_ran(make_moh, batches) -> None:
    model = make_moh(dtype=torch.bfloat16, num_shared_heads=1, num_active_heads=2, shared_heads=[[1], [2]])
    gates = [[], []]
    handles = [
        router.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output[1].flatten(0, 1)))
        for router, kept in zip(model.routers, gates, strict=True)
    ]
    found = head_load(model, batches)
    for handle in handles:
        handle.remove()
    assert found.load == [torch.cat(kept).ne(0).double().mean(0).tolist() for kept in gates]


def test_texts_side_by_side_in_the_last_routed_layer(make_moh, batches) -> None:
    texts = {"one": batches[:1], "two": batches[1:]}
    for shared, layer in (([1, 2], 1), ([1, 4], 0)):
        model = make_moh(num_shared_heads=shared, num_active_heads=[2, max(3, shared[1])], router_type="linear")
        found = head_load_by_text(model, texts)
        assert found.layer == layer and found.tokens == {"one": 18, "two": 19}
        assert found.shared_heads == list(range(shared[layer]))
        for name, text in texts.items():
            alone = head_load(model, text)
            assert (found.load[name], found.balance[name]) == (alone.load[layer], alone.balance[layer])
    assert found.load["one"] != found.load["two"]


def test_texts_need_routed_heads_and_tokens(make_moh, batches) -> None:
    with pytest.raises(UserError, match="no routed heads"):
        head_load_by_text(make_moh(num_shared_heads=4, num_active_heads=4), {"one": batches})
    with pytest.raises(UserError, match="no tokens"):
        head_load_by_text(make_moh(), {"one": batches, "two": []})


def test_balance_of_known_loads() -> None:
    assert load_balance([0.5, 0.5, 0.5, 0.5]) == pytest.approx(1)
    assert load_balance([1.0, 0.0, 1.0, 0.0]) == pytest.approx(math.log(2) / math.log(4))
    assert load_balance([1.0, 0.0, 0.0]) == 0
    assert load_balance([0.3]) is None and load_balance([]) is None and load_balance([0.0, 0.0]) is None
