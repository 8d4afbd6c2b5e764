"""Feature rank against the singular values of all features side by side."""

import json
from dataclasses import asdict

import numpy as np
import torch

from moh_llm.analysis import rank
from moh_llm.analysis.rank import Rank, feature_rank


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
        routed = [head for head in range(model.config.num_attention_heads) if head not in shared]
        for kind, ids in (("shared", shared), ("routed", routed)):
            every[kind].append(rank_of(naive.heads[:, ids].reshape(37, -1)))
    assert found.shared == every["shared"] and found.routed == every["routed"]
    for kind, total in (("shared", found.shared_sum), ("routed", found.routed_sum)):
        assert asdict(total) == {key: sum(asdict(one)[key] for one in every[kind]) for key in asdict(total)}
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


def test_batches_do_not_matter(make_moh, batches, single_rows, unlike_plan, monkeypatch) -> None:
    model = make_moh(**unlike_plan)
    whole = feature_rank(model, batches)
    assert whole == feature_rank(model, single_rows(batches))
    monkeypatch.setattr(rank, "_ROWS", 4)
    assert whole == feature_rank(model, batches)


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


def test_weak_heads_count_down_to_the_threshold(make_moh) -> None:
    """The numerical rank of 24 routed features: s_1 * 24 * 2**-23 is 2.9e-6 of s_1."""
    ids = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    text = [{"input_ids": ids, "position_ids": torch.arange(32).expand(4, -1)}]
    for scale, wanted in ((1e-6, 16), (1e-3, 24)):
        model = make_moh(num_key_value_heads=4, num_shared_heads=1, num_active_heads=4)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight[8:16] *= scale
        assert feature_rank(model, text).routed[0].numerical == wanted
