"""Head counts from options."""

import pytest

from moh_llm.conversion.plan import PlanOptions, build_config, head_counts
from moh_llm.errors import UserError


@pytest.mark.parametrize(
    ("options", "heads", "expected"),
    [
        (PlanOptions(), 9, (3, 6)),
        (PlanOptions(num_active_heads=7), 9, (3, 7)),
        (PlanOptions(active_ratio=0.78), 9, (3, 7)),
        (PlanOptions(active_ratio=0.75), 32, (10, 24)),
        (PlanOptions(active_ratio=1.0), 9, (4, 9)),
        (PlanOptions(num_shared_heads=7), 9, (7, 7)),
        (PlanOptions(preset="paper"), 32, (16, 24)),
        (PlanOptions(preset="paper"), 8, (4, 6)),
        (PlanOptions(preset="paper"), 9, (4, 6)),
        (PlanOptions(preset="paper", num_active_heads=7), 9, (4, 7)),
        (PlanOptions(), 1, (1, 1)),
        (PlanOptions(preset="paper"), 1, (0, 1)),
    ],
)
def test_head_counts(options, heads, expected):
    assert head_counts(options, heads) == expected


def test_importance_shares_the_highest():
    base = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "model_type": "llama"}
    options = PlanOptions(num_shared_heads=2, num_active_heads=3, shared="importance")
    config = build_config(base, options, [[0.1, 5.0, 0.2, 3.0], [9.0, 1.0, 2.0, 0.0]])
    assert config.shared_heads == [[1, 3], [0, 2]]


def test_impossible_counts_are_named():
    base = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "model_type": "llama"}
    with pytest.raises(UserError, match="impossible head plan: num_active_heads=99 must lie between"):
        build_config(base, PlanOptions(num_active_heads=99))
