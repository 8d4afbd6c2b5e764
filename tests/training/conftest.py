"""The default conversion of a tiny model, a text, and recipes over them."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from trained import load_config

from moh_llm.modeling import MoHLlamaConfig
from moh_llm.training.config import TrainConfig
from moh_llm.training.loop import train

WORDS = ["a", "bright", "cold", "day", "in", "April", "clocks", "were", "striking", "thirteen", "over", "an", "square"]


@pytest.fixture(autouse=True)
def equal_bits(one_thread: None) -> None:
    """Every test here compares runs bit for bit, or may."""


@pytest.fixture(scope="session")
def base_folder(made_once: Callable[..., Path], make_llama: Callable[..., Path]) -> Path:
    """A random LLaMA of 2 layers and 4 heads (2 KV heads), not to be changed."""

    def make(folder: Path) -> None:
        made = make_llama(max_position_embeddings=64, tie_word_embeddings=True)
        shutil.copytree(made, folder, dirs_exist_ok=True)

    return made_once("base", make)


@pytest.fixture(scope="session")
def model_folder(made_once: Callable[..., Path], base_folder: Path, convert: Callable[..., int]) -> Path:
    """A conversion of `base_folder` whose routers learn, not to be changed.

    It has linear routers, value fallbacks, one shared head per layer, and uneven budgets: 3 and 1 active heads.
    """
    flags = ["--num-active-heads", "2", "--fallback", "value"]
    folder = made_once("moh", lambda folder: convert(base_folder, folder, *flags))
    config = MoHLlamaConfig.from_pretrained(folder)
    assert (config.router_type, config.head_fallback) == ("linear", "value")
    assert config.active_heads_per_layer == [3, 1]
    return folder


@pytest.fixture(scope="session")
def budget_folder(made_once: Callable[..., Path], base_folder: Path, convert: Callable[..., int]) -> Path:
    """A conversion of `base_folder` with threshold routers and short windows, of which each layer has routed heads."""
    flags = ["--local-window", "6", "local_sinks=2", "--context", "64", "--router", "threshold"]
    flags += ["--num-active-heads", "2", "--heldout-tokens", "0", "--num-shared-heads", "1"]
    return made_once("budget", lambda folder: convert(base_folder, folder, *flags))


@pytest.fixture(scope="session")
def paper_folder(made_once: Callable[..., Path], base_folder: Path, convert: Callable[..., int]) -> Path:
    """The paper's layer of `base_folder`: of 2 active heads in each layer one is shared, and none has a fallback."""
    flags = ["--preset", "paper", "--num-shared-heads", "1", "--num-active-heads", "2"]
    folder = made_once("paper-moh", lambda folder: convert(base_folder, folder, *flags))
    assert MoHLlamaConfig.from_pretrained(folder).active_heads_per_layer == [2, 2]
    return folder


@pytest.fixture(scope="session")
def mixture_file(made_once: Callable[..., Path]) -> Path:
    """A mixture of texts and of completions, of 5 to 200 letters, so that blocks differ in tokens with a loss."""

    def make(folder: Path) -> None:
        draw = random.Random(0)
        lines = [" ".join(draw.choices(WORDS, k=draw.choice([1, 2, 8, 30]))) for _ in range(300)]
        texts = [{"text": line} for line in lines[:150]]
        pairs = [{"prompt": f"{line[: len(line) // 2]} ", "completion": line.upper()} for line in lines[150:]]
        for name, records in (("one", texts), ("two", pairs)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        sources = {"one": {"weight": 0.7, "files": "one.jsonl"}, "two": {"weight": 0.3, "files": "two.jsonl"}}
        sources["two"]["type"] = "prompt_completion"
        (folder / "mixture.yaml").write_text(yaml.safe_dump({"name": "tiny", "sources": sources}))

    return made_once("mixture", make) / "mixture.yaml"


@pytest.fixture(scope="session")
def write_recipe(model_folder: Path, mixture_file: Path) -> Callable[[Path], Path]:
    """`write_recipe(folder)`: a recipe of 6 short steps that writes to `folder/run`."""

    def write(folder: Path) -> Path:
        content = {
            "model": str(model_folder),
            "output_dir": str(folder / "run"),
            "max_steps": 6,
            "data": {"mixture": str(mixture_file), "sequence_length": 32, "batch_size": 4, "micro_batch_size": 2},
            "optimizer": {"learning_rate": 1e-3, "router_learning_rate": 1e-2},
            "schedule": {"warmup_steps": 1, "final_learning_rate": 1e-4},
            "evaluation": {"eval_steps": 3, "max_tokens": 512},
            "checkpoint": {"save_steps": 2},
        }
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def recipe(tmp_path: Path, write_recipe: Callable[[Path], Path]) -> Path:
    """That recipe, which writes to `tmp_path/run`."""
    return write_recipe(tmp_path)


@pytest.fixture
def configure(recipe: Path) -> Callable[..., TrainConfig]:
    """The recipe with overrides, in float32: `configure(max_steps=3, **{"data.batch_size": 8})`."""

    def make(**overrides: object) -> TrainConfig:
        overrides = {"mixed_precision": "no"} | overrides  # what is called without `train` sees no auto
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in overrides.items()}
        return load_config(recipe, [f"--{name}={text}" for name, text in texts.items()])

    return make


@pytest.fixture(scope="session")
def finished_run(made_once: Callable[..., Path], write_recipe: Callable[[Path], Path]) -> Path:
    """The finished run of that recipe, not to be changed."""
    return made_once("finished-run", lambda folder: train(load_config(write_recipe(folder)))) / "run"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it, where the fixtures `recipe` and `configure` write."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))
