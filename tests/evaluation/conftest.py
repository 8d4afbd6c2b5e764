"""A tiny random LLaMA and its conversions, by default and by the paper, with the context that few-shot prompts need."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def evaluate_arguments() -> Callable[..., argparse.Namespace]:
    """The arguments of `moh-llm evaluate` from its words."""
    from moh_llm.commands import evaluate

    def parse(*words: object) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        evaluate.add_arguments(parser)
        parsed = parser.parse_args([str(word) for word in words])
        parsed.command_line = " ".join(["moh-llm", "evaluate", *map(str, words)])  # as the command line would set it
        return parsed

    return parse


@pytest.fixture(scope="session")
def run_evaluate(evaluate_arguments: Callable[..., argparse.Namespace]) -> Callable[..., int]:
    """`moh-llm evaluate` in this process; returns the exit status."""
    from moh_llm.commands import evaluate

    return lambda *words: evaluate.run(evaluate_arguments(*words))


@pytest.fixture(scope="session")
def without_times() -> Callable[[Any], Any]:
    """A report's record less all that may differ between two runs of the same work."""
    varying = {"seconds", "items_per_second", "created", "command", "processes", "hardware"}

    def strip(record: Any) -> Any:
        if isinstance(record, dict):
            return {key: strip(value) for key, value in record.items() if key not in varying}
        return [strip(value) for value in record] if isinstance(record, list) else record

    return strip


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """A real LLaMA of 260,000 parameters among the real data beside the checkout."""
    return shared / "data" / "checkpoints" / "stories260K-hf"


@pytest.fixture(scope="session")
def shared_benchmarks(shared: Path) -> Path:
    """The benchmark data among the real data beside the checkout."""
    return shared / "data" / "benchmarks"


@pytest.fixture(scope="session")
def tiny_llama(make_llama: Callable[..., Path]) -> Path:
    """A random LLaMA (2 layers, 8 heads, hidden 64) with its tokenizer, whose layers lose unlike shares of heads."""
    return make_llama(num_attention_heads=8, hidden_size=64, max_position_embeddings=2048, initializer_range=0.1)


@pytest.fixture(scope="session")
def tiny_moh(tiny_llama: Path, convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny LLaMA as `moh-llm convert` makes it by default, not to be changed."""
    folder = tmp_path_factory.mktemp("moh") / "default"
    assert convert(tiny_llama, folder, "--verify", "none") == 0
    config = json.loads((folder / "config.json").read_text())
    assert (config["router_type"], config["head_stand_in"]) == ("linear", "value")
    fewer, more = sorted(config["num_active_heads"])
    assert config["num_shared_heads"] < fewer < more < 8  # uneven, and both layers choose
    return folder


@pytest.fixture(scope="session")
def paper_moh(tiny_llama: Path, convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny LLaMA with the paper's layer (query norm, half of the heads shared, 6 of 8 on), not to be changed."""
    folder = tmp_path_factory.mktemp("moh") / "paper"
    assert convert(tiny_llama, folder, "--preset", "paper", "--verify", "none") == 0
    return folder
