"""FLOPs against a counter on real passes: training, inference, and a pass that computes the least it can."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moh_llm.flops import computed_parts, forward_flops, keys_read, training_flops
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.tensors import is_routing_weight
from moh_llm.training.config import ObjectiveConfig
from moh_llm.training.step import TrainingStep

LENGTH, LAYERS, HEADS, HIDDEN, SIZE, WIDE = 24, 3, 4, 32, 10, 48
ROUTING = {
    "query_norm": {"router_type": "query_norm"},
    "linear": {"router_type": "linear"},
    "fallbacks": {"router_type": "linear", "head_fallback": "value", "num_shared_heads": [0, 1, 3]},
    "two_stage": {"router_type": "two_stage"},
    "groups": {
        "router_type": "linear",
        "routing_granularity": "kv_group",
        "num_shared_heads": 0,
        "num_active_heads": 2,
    },
    "experts": {"router_type": "linear", "num_local_experts": 5, "num_experts_per_tok": 3},
    "groups, two_stage": {"router_type": "two_stage", "routing_granularity": "kv_group", "num_active_heads": 2},
}


# Tiny, with shared heads of any number and budgets that differ; and of a real model's proportions.
SPARSE = {
    "uneven": {"num_shared_heads": [2, 1, 1], "shared_heads": [[0, 3], [2], [1]], "num_active_heads": [2, 3, 3]},
    "medium": {
        **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 16},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "num_shared_heads": 1, "num_active_heads": [5, 7, 3, 6]},
    },
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


def counter() -> FlopCounterMode:
    """Of matrix products, also those within PyTorch's flash attention for CPUs, which torch does not count."""

    def scores_and_sums(query, key, value, *given, **more) -> int:
        batch, heads, queries, size = query
        return 2 * 2 * batch * heads * queries * key[2] * size  # all scores, T x T

    def gradients(gradient, query, *given, **more) -> int:
        return 2 * scores_and_sums(query, *given)  # scores that the kernel does not keep are left out

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return FlopCounterMode(display=False, custom_mapping={flash: scores_and_sums, backward: gradients})


def counted_flops(config: MoHLlamaConfig, teacher: bool, recompute: bool, frozen: bool) -> int:
    """Matrix products of a step's forward and backward pass."""

    def build() -> MoHLlamaForCausalLM:
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # whose products are counted
        return MoHLlamaForCausalLM._from_config(config, **eager)

    student, base = build(), build().requires_grad_(False) if teacher else None
    if base is not None:
        base.set_active_heads(HEADS)
    if recompute:
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if frozen:
        for name, weight in student.named_parameters():
            weight.requires_grad_(is_routing_weight(name))
        # Adapters of the first layer would ask for this gradient.
        student.enable_input_require_grads()
    step = TrainingStep(student, base, ObjectiveConfig(kind="distillation" if teacher else "cross_entropy")).train()
    ids, positions = torch.randint(100, (1, LENGTH)), torch.arange(LENGTH)[None]
    with counter() as counted:
        task, _, balance, _, experts, _ = step(ids, positions, ids)
        (task + balance + experts).backward()
    return counted.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["all trained", "frozen"])
@pytest.mark.parametrize("teacher", [False, True], ids=["alone", "teacher"])
@pytest.mark.parametrize("routing", ROUTING)
def test_the_count_is_a_real_training_pass(routing, teacher, frozen):
    config = make_config(routing)
    later = LAYERS * HEADS * (LENGTH * (LENGTH - 1) // 2) * 2 * 2 * SIZE  # scores and sums of later positions
    routed = sum(HEADS - len(shared) for shared in config.shared_heads_per_layer)
    elementwise = 2 * LENGTH * routed * SIZE if config.head_fallback != "none" else 0  # which the counter does not see
    without = 3 * elementwise - (3 + teacher) * later  # the teacher has no fallback
    kl = teacher * 2 * LENGTH * 100  # an inner product over the vocabulary, which is left out
    expected = counted_flops(config, teacher, False, frozen) + without - kl
    assert training_flops(config, LENGTH, teacher, recompute=False, frozen=frozen) == expected


def test_recomputing_adds_the_layers_but_for_what_torch_leaves_out():
    config = make_config("linear")
    added = training_flops(config, LENGTH, False, True, False) - training_flops(config, LENGTH, False, False, False)
    later = LAYERS * HEADS * (LENGTH * (LENGTH - 1) // 2) * 2 * 2 * SIZE
    counted = counted_flops(config, False, True, False) - counted_flops(config, False, False, False) - later
    # A recomputation ends when the last tensor to keep is there, which is the input of the last product.
    last_product = LAYERS * 2 * LENGTH * WIDE * HIDDEN
    assert added == counted + last_product


def make_sparse(name: str, router: str, fallback: str) -> MoHLlamaForCausalLM:
    fields = {
        **{"vocab_size": 100, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": SIZE, "initializer_range": 0.2},
    }
    fields |= SPARSE[name] | {"router_type": router, "head_fallback": fallback}
    torch.manual_seed(0)
    model = MoHLlamaForCausalLM._from_config(MoHLlamaConfig(**fields), attn_implementation="eager").double().eval()
    for layer in model.model.layers:
        if layer.self_attn.fallback is not None:
            torch.nn.init.normal_(layer.self_attn.fallback.bias)
    return model


@pytest.mark.parametrize("fallback", ["none", "value"])
@pytest.mark.parametrize(("name", "router"), [("uneven", "linear"), ("uneven", "two_stage"), ("medium", "linear")])
def test_the_computed_count_is_what_a_pass_computes(name, router, fallback):
    """In inference of a text whose tokens have the same heads on, and where there are gradients."""
    model, length = make_sparse(name, router, fallback), 12
    config = model.config
    # Attention to equal values gives equal values, and so do these fallbacks, a document's first one, too.
    for layer in model.model.layers if fallback == "value" else ():
        for name, weight in layer.self_attn.fallback.named_parameters():
            torch.nn.init.constant_(weight, 1 if name == "own_value.bias" else 0)
    ids = torch.zeros(1, length, dtype=torch.int64)
    total, on = config.num_hidden_layers * config.num_attention_heads, sum(config.active_heads_per_layer)
    routed = total - sum(map(len, config.shared_heads_per_layer))
    elementwise = 2 * length * routed * config.head_dim if fallback == "value" else 0  # which the counter does not see
    for training, heads in ((False, on), (True, total)):
        with torch.set_grad_enabled(training), counter() as counted:
            model(ids, use_cache=False)
        later = heads * (length * (length - 1) // 2) * 2 * 2 * config.head_dim  # scores and sums of later positions
        parts = computed_parts(config, length, training)
        assert sum(parts.values()) == counted.get_total_flops() - later + elementwise


def test_hand_counted_sums():
    """Multiply-adds over two tokens of one layer; its second head is off and the first one shared."""
    sizes = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 1, "head_dim": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_shared_heads": 1, "num_active_heads": 1}
    keys_and_values, feed_forward, vocabulary, router = 32, 72, 40, 8
    always = keys_and_values + feed_forward + vocabulary
    linear = MoHLlamaConfig(**sizes, router_type="linear")
    #                                                        queries, 3 pairs of scores and sums, output projection
    assert forward_flops(linear, 2, dense=True) == 2 * (always + 32 + 24 + 32)
    assert forward_flops(linear, 2) == 2 * (always + router + 16 + 12 + 16)
    # The fallback is a row of 4 weights a token and b + a v of 2 numbers; it goes through the projection, too.
    value = MoHLlamaConfig(**sizes, router_type="linear", head_fallback="value")
    assert forward_flops(value, 2) == 2 * (always + router + 16 + 12 + 32 + 8 + 4)
    # The paper's router takes all queries' norms.
    assert forward_flops(MoHLlamaConfig(**sizes), 2) == 2 * (always + 32 + 12 + 16)


@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (1, 0), (60, 4)])
@pytest.mark.parametrize("start", [0, 4, 17])
@pytest.mark.parametrize("until", [0, 3, 20, 50])
def test_keys_read_are_those_of_a_loop(window, sinks, start, until):
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "num_key_value_heads": 3}
    plan = {"num_shared_heads": [2, 0], "num_active_heads": [2, 1], "router_type": "linear"}
    seen = {"local_window": window, "local_sinks": sinks, "local_start": until}
    local = MoHLlamaConfig(**sizes, **plan, head_fallback="local", **seen)
    on = [position + 1 for position in range(start, 40)]
    off = [position + 1 if position < until else min(position + 1, window + sinks) for position in range(start, 40)]
    assert keys_read(local, 40, start) == pytest.approx((3 * sum(on) + 3 * sum(off)) / (6 * sum(on)))
    assert keys_read(MoHLlamaConfig(**sizes, **plan, head_fallback="value"), 40, start) == pytest.approx(0.5)


def test_a_local_fallback_costs_its_query_and_the_keys_in_sight():
    """One shared head and one that is never on, over three tokens with one token in sight."""
    sizes = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 1, "head_dim": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_shared_heads": 1, "num_active_heads": 1}
    local = MoHLlamaConfig(**sizes, router_type="none", head_fallback="local", local_window=1, local_sinks=0)
    keys_and_values, feed_forward, vocabulary, queries, projection = 48, 108, 60, 48, 48
    scores, fallback = 6 * 4 + 3 * 4, 3 * (4 + 2)
    expected = 2 * (keys_and_values + feed_forward + vocabulary + queries + projection + scores + fallback)
    assert forward_flops(local, 3) == sum(computed_parts(local, 3).values()) == expected


@pytest.mark.parametrize("start", [0, 2, 5, 30])
@pytest.mark.parametrize("length", [3, 8, 21])
def test_the_computed_keys_are_those_of_a_loop(start, length):
    """One shared head, one that is never on and two that may be, with three tokens in sight."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "head_dim": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2}
    plan = {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "threshold", "never_on_heads": [[3]]}
    seen = {"head_fallback": "local", "local_window": 2, "local_sinks": 1, "local_start": start}
    every = [position + 1 for position in range(length)]
    first, later = (every[:start], every[start:]) if start > 3 else ([], every)
    pairs = 3 * sum(every) + sum(first) + 3 * sum(min(keys, 3) for keys in later)
    parts = computed_parts(MoHLlamaConfig(**sizes, **plan, **seen), length, training=True)
    assert parts["scores and weighted sums"] == 2 * pairs * 2 * 2
