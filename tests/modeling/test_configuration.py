"""Head plans: what is accepted, what is refused and in which words."""

import pytest

from moh_llm.modeling import MoHLlamaConfig

SIZE = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}


def test_defaults_are_the_papers():
    config = MoHLlamaConfig(hidden_size=32, num_attention_heads=32, num_hidden_layers=2)
    assert (config.num_shared_heads, config.num_active_heads) == (16, 24)
    assert (config.router_type, config.router_score, config.head_balance_coef) == ("query_norm", "quantized", 0.01)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [(9, 3, (3, 6)), (32, 8, (16, 24)), (12, 2, (6, 6)), (4, 1, (0, 4)), (5, 5, (2, 3)), (8, 4, (4, 6))],
)
def test_defaults_are_rounded_down_to_whole_groups(heads, kv_heads, expected):
    size = {"hidden_size": 4 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = MoHLlamaConfig(**size, num_hidden_layers=2, routing_granularity="kv_group")
    assert (config.num_shared_heads, config.num_active_heads) == expected
    assert config.heads_per_group == heads // kv_heads


@pytest.mark.parametrize(("granularity", "version", "per_group"), [("kv_group", 2, 3), ("head", 1, 1)])
def test_the_format_is_the_lowest_that_knows_the_fields(tmp_path, granularity, version, per_group):
    """Code of format 1 would pass over `routing_granularity` and misread the router."""
    MoHLlamaConfig(**SIZE, routing_granularity=granularity).save_pretrained(tmp_path)
    again = MoHLlamaConfig.from_pretrained(tmp_path)
    assert (again.moh_format, again.routing_granularity, again.heads_per_group) == (version, granularity, per_group)


def test_per_layer_counts_and_ids_survive_saving(tmp_path):
    plan = {"num_shared_heads": [1, 2], "num_active_heads": [9, 4], "shared_heads": [[8], [3, 0]]}
    MoHLlamaConfig(**SIZE, **plan, router_type="linear").save_pretrained(tmp_path)
    again = MoHLlamaConfig.from_pretrained(tmp_path)
    assert again.active_heads_per_layer == [9, 4] and again.shared_heads_per_layer == [[8], [0, 3]]
    assert again.routed_heads(1) == [1, 2, 4, 5, 6, 7, 8] and again.router_type == "linear"


def test_names_of_earlier_versions_are_read():
    renamed = MoHLlamaConfig(**SIZE, router_aux_loss_coef=0.5)
    assert renamed.head_balance_coef == 0.5 and "router_aux_loss_coef" not in renamed.to_dict()
    never_on = MoHLlamaConfig(**SIZE, head_fallback="local", local_heads=[[8], []])
    assert never_on.never_on_heads_per_layer == [[8], []] and "local_heads" not in never_on.to_dict()
    assert never_on.moh_format == 6  # older code would pass over the new name


GROUPED = {"routing_granularity": "kv_group"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_active_heads": 10}, "num_active_heads=10 must lie between num_shared_heads=4 and num_attention_heads=9"),
        ({"num_shared_heads": 0, "num_active_heads": 0}, "num_active_heads=0 must lie between 1 and"),
        ({"num_active_heads": [7, 3]}, r"num_active_heads=3 must lie .* \(layer 1\)"),
        ({"shared_heads": [[0]]}, "shared_heads has 1 entries for num_hidden_layers=2"),
        (
            {"num_shared_heads": 1, "shared_heads": [[0], [9]]},
            r"\[9\] must be 1 different head ids .*=9 \(layer 1\)",
        ),
        (GROUPED | {"num_active_heads": [6, 7]}, r"num_active_heads=7 must be whole .* \(layer 1\)"),
        (
            GROUPED | {"num_shared_heads": 3, "shared_heads": [[3, 4, 5], [2, 3, 4]]},
            r"shared_heads=\[2, 3, 4\] must be whole key-value groups of 3 heads, .* \(layer 1\)",
        ),
        ({"router_type": "norm"}, "router_type='norm' must be one of query_norm, linear, threshold, two_stage"),
        ({"head_fallback": "value", "router_score": "weighted"}, "head_fallback=.value. needs router_score"),
        ({"router_score": "normalized"}, "router_score='normalized' needs router_type='two_stage', not 'query_norm'"),
        ({"router_type": "two_stage", "num_shared_heads": 0}, "needs at least one shared and one routed head"),
        ({"router_type": "two_stage", "head_fallback": "local"}, "needs another router than two_stage"),
    ],
)
def test_impossible_plans_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MoHLlamaConfig(**SIZE, **fields)
