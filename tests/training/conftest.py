"""A tiny converted model with a tokenizer and a text, and recipes over them."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training.config import TrainConfig
from moh_llm.training.recipe import load_config

WORDS = ["a", "bright", "cold", "day", "in", "April", "clocks", "were", "striking", "thirteen", "over", "an", "square"]


@pytest.fixture(autouse=True)
def equal_bits(one_thread: None) -> None:
    """Every test here compares runs bit for bit, or may."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[[Path], int]) -> Path:
    """A random model of 2 layers and 4 heads (2 KV heads) that uses 2 of them, with linear routers."""
    folder = tmp_path_factory.mktemp("model")
    vocab_size = byte_tokenizer(folder)
    torch.manual_seed(0)
    config = MoHLlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,  # large enough that a head that is off is felt
        num_shared_heads=1,
        num_active_heads=2,
        router_type="linear",
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=0,
    )
    MoHLlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixture_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of two sources with documents of 5 to 200 letters, so that blocks differ in valid tokens."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for name in ("one", "two"):
        lines = [" ".join(draw.choices(WORDS, k=draw.choice([1, 2, 8, 30]))) for _ in range(150)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    sources = {"one": {"weight": 0.7, "files": "one.jsonl"}, "two": {"weight": 0.3, "files": "two.jsonl"}}
    (folder / "mixture.yaml").write_text(yaml.safe_dump({"name": "tiny", "sources": sources}))
    return folder / "mixture.yaml"


@pytest.fixture
def recipe(tmp_path: Path, model_folder: Path, mixture_file: Path) -> Path:
    """A recipe of 6 short steps that writes to `tmp_path/run`."""
    content = {
        "model": str(model_folder),
        "output": str(tmp_path / "run"),
        "max_steps": 6,
        "data": {"mixture": str(mixture_file), "block_length": 32, "batch_size": 4, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 1e-3, "router_learning_rate": 1e-2},
        "schedule": {"warmup_steps": 1, "start_learning_rate": 1e-4, "final_learning_rate": 1e-4},
        "evaluation": {"every": 3, "max_tokens": 512},
        "checkpoint": {"every": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def configure(recipe: Path) -> Callable[..., TrainConfig]:
    """The recipe with overrides: `configure(max_steps=3, **{"data.batch_size": 8})`."""

    def make(**overrides: object) -> TrainConfig:
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in overrides.items()}
        return load_config(recipe, [f"--{name}={text}" for name, text in texts.items()])

    return make
