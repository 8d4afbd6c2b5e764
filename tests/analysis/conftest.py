"""Tiny MoH models of many head plans, packed batches, and what each layer does with them as plain loops."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

_spec = importlib.util.spec_from_file_location("naive", Path(__file__).parents[1] / "modeling" / "naive.py")
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)

PLANS = {
    "default conversion": {"converted": True},
    "paper": {"num_shared_heads": 2, "num_active_heads": 3, "router_type": "query_norm"},
    "two_stage, weighted, explicit ids": {
        "num_shared_heads": 2,
        "num_active_heads": 3,
        "shared_heads": [[3, 0], [1, 2]],
        "router_type": "two_stage",
        "router_score": "weighted",
    },
    "linear, weighted, no shared head": {
        "num_shared_heads": 0,
        "num_active_heads": 2,
        "router_type": "linear",
        "router_score": "weighted",
    },
    "fallbacks, explicit ids": {
        "num_shared_heads": 2,
        "num_active_heads": 3,
        "shared_heads": [[1, 3], [0, 2]],
        "router_type": "linear",
        "head_fallback": "value",
    },
    "fallbacks, last layer all shared": {
        "num_shared_heads": [1, 4],
        "num_active_heads": [1, 4],
        "router_type": "linear",
        "head_fallback": "value",
    },
    "groups, query_norm": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 32,
        "num_shared_heads": 2,
        "num_active_heads": 4,
        "shared_heads": [[2, 3], [7, 6]],
        "router_type": "query_norm",
        "routing_granularity": "kv_group",
    },
    "groups, two_stage, weighted": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 48,
        "num_shared_heads": 2,
        "num_active_heads": 4,
        "router_type": "two_stage",
        "router_score": "weighted",
        "routing_granularity": "kv_group",
    },
}
POSITIONS = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 0]]


@dataclass(frozen=True)
class NaiveLayer:
    """One layer on all tokens N of some rows, in their order; heads in the model's order.

    `gates` `[N, H]` and `scores` `[N, H]` (before selection; None: no such score), attention rows
    `patterns`, per token `[H, keys of its row]`, and `heads` `[N, H, D]`, what is projected.
    """

    gates: np.ndarray
    scores: list[list[float | None]]
    patterns: list[np.ndarray]
    heads: np.ndarray


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def plan(request: pytest.FixtureRequest) -> dict:
    """A head plan."""
    return request.param


@pytest.fixture(
    params=[
        "default conversion",
        "two_stage, weighted, explicit ids",
        "fallbacks, last layer all shared",
        "groups, query_norm",
    ]
)
def unlike_plan(request: pytest.FixtureRequest) -> dict:
    """Some of the plans, for the record."""
    return PLANS[request.param]


@pytest.fixture(scope="session")
def default_moh(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A LLaMA of 2 layers and 8 heads as `moh-llm convert` makes it by default, not to be changed."""
    folder = tmp_path_factory.mktemp("default") / "moh"
    base = make_llama(num_attention_heads=8, hidden_size=64, max_position_embeddings=2048, initializer_range=0.1)
    assert convert(base, folder, "--verify", "none") == 0
    config = MoHLlamaConfig.from_pretrained(folder)
    assert (config.router_type, config.head_fallback) == ("linear", "value")
    fewer, more = sorted(config.active_heads_per_layer)
    assert config.num_shared_heads < fewer < more < 8  # uneven, and both layers choose
    return folder


@pytest.fixture
def make_moh(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., MoHLlamaForCausalLM]:
    """A random model of 2 layers and 4 heads, 2 KV heads; keywords are config fields. ``converted``: `default_moh`."""

    def make(dtype: torch.dtype = torch.float64, converted: bool = False, **fields: object) -> MoHLlamaForCausalLM:
        if converted:
            folder = request.getfixturevalue("default_moh")
            return MoHLlamaForCausalLM.from_pretrained(folder, dtype=dtype, max_position_embeddings=64).eval()
        defaults = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
        }
        torch.manual_seed(0)
        model = MoHLlamaForCausalLM(MoHLlamaConfig(**(defaults | fields)))
        for layer in model.model.layers:
            if layer.self_attn.fallback is not None:
                torch.nn.init.normal_(layer.self_attn.fallback.bias)  # zero in a fresh model
        # Through a folder, as for a user: rotary tables stay float32.
        model.save_pretrained(tmp_path / "moh")
        return MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh", dtype=dtype).eval()

    return make


@pytest.fixture
def batch() -> Batch:
    """Three rows of 9 tokens, two of them packed from several documents."""
    ids = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.tensor(POSITIONS), "labels": ids}


@pytest.fixture
def batches(batch: Batch) -> list[Batch]:
    """The rows as two batches of unequal size, an empty one, and a third batch of shorter rows."""
    short = {name: tensor[:2, :5] for name, tensor in batch.items()}
    parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(2), slice(2, 3), slice(0))]
    return [*parts, short]


@pytest.fixture
def recompute() -> Callable[[MoHLlamaForCausalLM, list[Batch]], list[NaiveLayer]]:
    """Every layer by loops over tokens and heads, from its input (its norm's output) and its weights."""

    def run(model: MoHLlamaForCausalLM, batches: list[Batch]) -> list[NaiveLayer]:
        weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        found = []
        for number, layer in enumerate(model.model.layers):
            parts = []
            for batch in batches:
                if len(batch["input_ids"]):
                    inputs = _input_of(model, layer.input_layernorm, batch).numpy()
                    positions = batch["position_ids"].numpy()
                    parts += [_row(model.config, weights, number, *row) for row in zip(inputs, positions, strict=True)]
            found.append(
                NaiveLayer(
                    gates=np.concatenate([part.gates for part in parts]),
                    scores=[scores for part in parts for scores in part.scores],
                    patterns=[pattern for part in parts for pattern in part.patterns],
                    heads=np.concatenate([part.heads for part in parts]),
                )
            )
        return found

    return run


@torch.no_grad()
def _input_of(model: MoHLlamaForCausalLM, norm: torch.nn.Module, batch: Batch) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    handle = norm.register_forward_hook(lambda module, args, output: kept.append(output))
    model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    handle.remove()
    return kept[0]


def _row(config: MoHLlamaConfig, weights: dict, layer: int, x: np.ndarray, positions: np.ndarray) -> NaiveLayer:
    """One row `[T, C]` of packed documents."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    prefix = f"model.layers.{layer}.self_attn."
    q, k, v = (
        (x @ weights[f"{prefix}{name}_proj.weight"].T).reshape(len(x), count, size)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    gates = np.stack([naive.gates(config, weights, layer, x[t], q[t]) for t in range(len(x))])
    routed = [head for head in range(heads) if head not in config.shared_heads_per_layer[layer]]
    patterns, outputs = [], np.zeros((len(x), heads, size))
    for t, position in enumerate(positions):
        pattern = np.zeros((heads, len(x)))
        for head in range(heads):
            group, document = head // (heads // kv_heads), range(t - position, t + 1)
            turned = _rotate(q[t, head], position, config)
            scores = [turned @ _rotate(k[s, group], positions[s], config) / size**0.5 for s in document]
            pattern[head, list(document)] = naive.softmax(np.array(scores))
            outputs[t, head] = gates[t, head] * (pattern[head] @ v[:, group])
            if gates[t, head] == 0 and config.head_fallback == "value":
                name, row = f"{prefix}fallback.", routed.index(head)
                share = weights[f"{name}own_value.weight"][row] @ x[t] + weights[f"{name}own_value.bias"][row]
                fitted = weights[f"{name}bias"][row] + share * v[t, group]
                outputs[t, head] = fitted if position else v[t, group]
        patterns.append(pattern)
    scores = [_scores(config, weights, layer, x[t], q[t]) for t in range(len(x))]
    return NaiveLayer(gates, scores, patterns, outputs)


def _rotate(vector: np.ndarray, position: int, config: MoHLlamaConfig) -> np.ndarray:
    half = len(vector) // 2
    angle = position / config.rope_parameters["rope_theta"] ** (np.arange(half) / half)
    a, b = vector[:half], vector[half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


def _scores(config: MoHLlamaConfig, weights: dict, layer: int, x: np.ndarray, q: np.ndarray) -> list[float | None]:
    """Real-valued scores of one token: Eq. 5 and 6, or the softmax over routed heads."""
    shared = config.shared_heads_per_layer[layer]
    routed = [head for head in range(config.num_attention_heads) if head not in shared]
    scores: list[float | None] = [None] * config.num_attention_heads
    if not routed:
        return scores
    prefix = f"model.layers.{layer}.self_attn.router."
    group_size = (
        config.num_attention_heads // config.num_key_value_heads if config.routing_granularity == "kv_group" else 1
    )
    if config.router_type == "query_norm":
        norms = np.sqrt((q[routed] ** 2).sum(-1).reshape(-1, group_size).sum(-1))
        logits = norms / norms.std(ddof=1)
    else:
        logits = weights[f"{prefix}routed.weight"] @ x + weights.get(f"{prefix}routed.bias", 0)
    real = naive.softmax(logits)
    if config.router_type == "two_stage":
        stage = naive.softmax(weights[f"{prefix}stage.weight"] @ x)
        real = stage[1] * real
        own = naive.softmax(weights[f"{prefix}shared.weight"] @ x).repeat(group_size)
        for head, score in zip(shared, own, strict=True):
            scores[head] = stage[0] * score
    for head, score in zip(routed, real.repeat(group_size), strict=True):
        scores[head] = score
    return scores
