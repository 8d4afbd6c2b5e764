"""Tiny MoH models of many head plans, packed batches, and what each layer does with them as plain loops."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from pairs import make_pair  # noqa: F401
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

_spec = importlib.util.spec_from_file_location("naive", Path(__file__).parents[1] / "modeling" / "naive.py")
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)

PLANS = {
    "conversion": {"converted": True},
    "paper": {"num_shared_heads": 2, "num_active_heads": 3, "router_type": "query_norm"},
    "two_stage, weighted, explicit ids": {
        **{"num_shared_heads": 2, "num_active_heads": 3, "shared_heads": [[3, 0], [1, 2]]},
        **{"router_type": "two_stage", "router_score": "weighted"},
    },
    "fallbacks, last layer all shared": {
        **{"num_shared_heads": [1, 4], "num_active_heads": [1, 4], "router_type": "linear", "head_fallback": "value"},
    },
    "local, threshold": {
        **{"num_shared_heads": [1, 0], "num_active_heads": [2, 1], "never_on_heads": [[0], [2]]},
        **{"shared_heads": [[2], []], "router_type": "threshold"},
        **{"head_fallback": "local", "local_window": 2, "local_sinks": 1},
    },
    "groups, query_norm": {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32, "num_shared_heads": 2},
        **{"num_active_heads": 4, "shared_heads": [[2, 3], [7, 6]], "router_type": "query_norm"},
        "routing_granularity": "kv_group",
    },
}
POSITIONS = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 0]]


@dataclass(frozen=True)
class NaiveLayer:
    """One layer on all tokens N of some rows, in their order; heads in the model's order.

    `gates` `[N, H]`, attention rows `patterns`, per token `[H, keys of its row]`, and `heads` `[N, H, D]`, what is
    projected.
    """

    gates: np.ndarray
    patterns: list[np.ndarray]
    heads: np.ndarray


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def plan(request: pytest.FixtureRequest) -> dict:
    """A head plan."""
    return request.param


@pytest.fixture(
    params=[
        "conversion",
        "two_stage, weighted, explicit ids",
        "fallbacks, last layer all shared",
        "local, threshold",
        "groups, query_norm",
    ]
)
def unlike_plan(request: pytest.FixtureRequest) -> dict:
    """Some of the plans, for the record."""
    return PLANS[request.param]


@pytest.fixture(scope="session")
def value_moh(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A LLaMA of 2 layers and 8 heads as `moh-llm convert --fallback value` makes it, not to be changed."""
    folder = tmp_path_factory.mktemp("default") / "moh"
    base = make_llama(num_attention_heads=8, hidden_size=64, max_position_embeddings=2048, initializer_range=0.1)
    assert convert(base, folder, "--context", "512", "--fallback", "value", "--heldout-tokens", "0") == 0
    fewer, more = sorted(MoHLlamaConfig.from_pretrained(folder).active_heads_per_layer)
    assert fewer < more < 8  # uneven, and both layers choose
    return folder


@pytest.fixture
def make_moh(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., MoHLlamaForCausalLM]:
    """A random model of 2 layers and 4 heads, 2 KV heads; keywords are config fields. ``converted``: `value_moh`."""

    def make(dtype: torch.dtype = torch.float64, converted: bool = False, **fields: object) -> MoHLlamaForCausalLM:
        if converted:
            folder = request.getfixturevalue("value_moh")
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
            # Zero in a fresh model.
            for name, weight in layer.self_attn.named_parameters():
                if name in ("fallback.bias", "fallback.distant_value", "fallback.distant_score.bias"):
                    torch.nn.init.normal_(weight)
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
                    parts += [
                        naive.heads_of(model.config, weights, number, *row)
                        for row in zip(inputs, positions, strict=True)
                    ]
            found.append(
                NaiveLayer(
                    gates=np.concatenate([part.gates for part in parts]),
                    patterns=[pattern for part in parts for pattern in part.patterns],
                    heads=np.concatenate([part.outputs for part in parts]),
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


@pytest.fixture
def tokenizer(byte_tokenizer: Callable[[Path], None], tmp_path: Path) -> PreTrainedTokenizerBase:
    """A token per byte."""
    byte_tokenizer(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
