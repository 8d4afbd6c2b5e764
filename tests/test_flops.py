"""FLOPs of a training pass against a counter on a real one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moh_llm.flops import forward_flops, training_flops
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, is_routing_weight
from moh_llm.training.config import ObjectiveConfig
from moh_llm.training.step import TrainingStep

LENGTH, LAYERS, HEADS, HIDDEN, SIZE, WIDE = 24, 3, 4, 32, 10, 48
ROUTING = {
    "query_norm": {"router_type": "query_norm"},
    "linear": {"router_type": "linear"},
    "stand-ins": {"router_type": "linear", "head_stand_in": "value", "num_shared_heads": [0, 1, 3]},
    "two_stage": {"router_type": "two_stage"},
    "groups": {"router_type": "linear", "routing_unit": "kv_group", "num_shared_heads": 0, "num_active_heads": 2},
    "groups, two_stage": {"router_type": "two_stage", "routing_unit": "kv_group", "num_active_heads": 2},
}


def make_config(routing: str) -> MoHLlamaConfig:
    return MoHLlamaConfig(
        vocab_size=100,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=SIZE,
        tie_word_embeddings=False,
        **({"num_active_heads": 3} | ROUTING[routing]),
    )


def counted_flops(config: MoHLlamaConfig, teacher: bool, recompute: bool, frozen: bool) -> int:
    """Matrix products of a step's forward and backward pass, whose attention is eager: all scores, T x T."""

    def build() -> MoHLlamaForCausalLM:
        return MoHLlamaForCausalLM._from_config(config, attn_implementation="eager")

    student, base = build(), build().requires_grad_(False) if teacher else None
    if recompute:
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if frozen:
        for name, weight in student.named_parameters():
            weight.requires_grad_(is_routing_weight(name))
        # Adapters of the first layer would ask for this gradient.
        student.enable_input_require_grads()
    step = TrainingStep(student, base, ObjectiveConfig(kind="distillation" if teacher else "cross_entropy")).train()
    ids, positions = torch.randint(100, (1, LENGTH)), torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as counter:
        task, _, balance, _ = step(ids, positions, ids)
        (task + balance).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "frozen"])
@pytest.mark.parametrize("teacher", [False, True], ids=["alone", "teacher"])
@pytest.mark.parametrize("routing", ROUTING)
def test_the_count_is_a_real_training_pass(routing, teacher, frozen):
    config = make_config(routing)
    passes = 3 + teacher  # of products without weights
    later = LAYERS * HEADS * (LENGTH * (LENGTH - 1) // 2) * 2 * 2 * SIZE  # scores and sums of later positions
    routed = sum(HEADS - len(shared) for shared in config.shared_heads_per_layer)
    elementwise = 2 * LENGTH * routed * SIZE if config.head_stand_in != "none" else 0  # which the counter does not see
    kl = teacher * 2 * LENGTH * 100  # an inner product over the vocabulary, which is left out
    expected = counted_flops(config, teacher, False, frozen) + passes * (elementwise - later) - kl
    assert training_flops(config, LENGTH, teacher, recompute=False, frozen=frozen) == expected


def test_recomputing_adds_the_layers_but_for_what_torch_leaves_out():
    config = make_config("linear")
    added = training_flops(config, LENGTH, False, True, False) - training_flops(config, LENGTH, False, False, False)
    later = LAYERS * HEADS * (LENGTH * (LENGTH - 1) // 2) * 2 * 2 * SIZE
    counted = counted_flops(config, False, True, False) - counted_flops(config, False, False, False) - later
    # A recomputation ends when the last tensor to keep is there, which is the input of the last product.
    last_product = LAYERS * 2 * LENGTH * WIDE * HIDDEN
    assert added == counted + last_product


def test_all_heads_are_computed_however_few_are_on():
    few, all_on = make_config("linear"), make_config("linear")
    all_on.num_active_heads = HEADS
    assert training_flops(few, 64, True, True, False) == training_flops(all_on, 64, True, True, False)
    assert training_flops(all_on, 64, False, False, False) == 3 * forward_flops(all_on, 64)
