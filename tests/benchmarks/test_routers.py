"""The paper's layer and random heads on a conversion's weights."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from moh_llm.metrics import logits_of
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from baselines.routers import RandomRouter, by_paper_plan, paper_plan, routed_as


@torch.no_grad()
def test_they_are_models_of_their_own_on_the_same_weights(make_llama, convert, tmp_path, one_thread):
    base = make_llama(num_hidden_layers=3)
    assert convert(base, tmp_path / "moh", "--fallback", "value", "--keys", "0.7", "--heldout-tokens", "0") == 0
    converted = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh").eval()
    dense = LlamaForCausalLM.from_pretrained(base).eval()
    # The paper's layer with as many active heads, written out: half of the four shared, chosen by the queries' norms.
    assert sum(converted.config.active_heads_per_layer) == 8  # 2.7 in each of 3 layers
    layer = {"num_shared_heads": 2, "num_active_heads": 3, "router_type": "query_norm"}
    shape = {
        name: value for name, value in dense.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    paper, chance = (MoHLlamaForCausalLM(MoHLlamaConfig(**shape, **layer)).eval() for _ in range(2))
    for model in (paper, chance):
        model.load_state_dict(dense.state_dict())
    for number, block in enumerate(chance.model.layers):
        drawn = torch.rand((2, 32, 2), generator=torch.Generator().manual_seed(number))
        block.self_attn.router._routed_logits = lambda hidden, queries, shard, drawn=drawn: drawn
    ids = torch.randint(1, 257, (2, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(32).expand(2, -1)}
    own = logits_of(converted)(batch)
    assert by_paper_plan(converted)(batch).equal(logits_of(paper)(batch))
    with routed_as(converted, paper_plan(converted.config), RandomRouter):
        assert logits_of(converted)(batch).equal(logits_of(chance)(batch))
    assert logits_of(converted)(batch).equal(own)  # its own routers and fallbacks are back


@pytest.mark.parametrize(
    ("active", "shared", "expected"),
    [
        ([2, 3], [[3], [2]], (2, 3)),
        ([1, 1], [[3], [2]], (1, 1)),
        ([4, 4], [[3], [2]], (2, 4)),
        ([2, 4], [[2, 3], [2, 3]], (2, 3)),  # by whole groups
    ],
)
def test_paper_plan_has_as_many_active_heads_on_average(active, shared, expected):
    granularity = "head" if len(shared[0]) == 1 else "kv_group"
    converted = MoHLlamaConfig(
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2},
        **{"num_shared_heads": len(shared[0]), "shared_heads": shared, "num_active_heads": active},
        **{"router_type": "linear", "head_fallback": "value", "query_key_norm": True, "attention_bias": True},
        attention_output_bias=False,
        routing_granularity=granularity,
        rope_parameters={"rope_type": "default", "rope_theta": 7.0},
    )
    paper = paper_plan(converted)
    assert (paper.num_shared_heads, paper.num_active_heads, paper.shared_heads) == (*expected, None)
    assert (paper.router_type, paper.router_score, paper.head_fallback) == ("query_norm", "quantized", "none")
    assert paper.routing_granularity == "head"
    plan = {"num_shared_heads", "num_active_heads", "shared_heads", "router_type", "head_fallback"}
    plan |= {"routing_granularity", "moh_format"}
    before, after = ({k: v for k, v in c.to_dict().items() if k not in plan} for c in (converted, paper))
    assert before == after
