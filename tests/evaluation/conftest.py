"""A tiny random LLaMA and a tiny MoH made from it, with the context that few-shot prompts need."""

import argparse
import json
import shutil
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
def tiny_llama(make_llama) -> Path:
    """A random LLaMA (2 layers, 4 heads, hidden 32) with its tokenizer."""
    return make_llama(max_position_embeddings=2048, initializer_range=0.3)


@pytest.fixture(scope="session")
def tiny_moh(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny LLaMA with 3 of its 4 heads active per token."""
    from transformers import LlamaForCausalLM

    from moh_llm.conversion.base import open_base
    from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(tiny_llama)
    shape = {key: value for key, value in base.config.to_dict().items() if key not in ("model_type", "architectures")}
    config = MoHLlamaConfig(**shape, num_shared_heads=2, num_active_heads=3, router_type="query_norm")
    model = MoHLlamaForCausalLM(config)
    model.load_state_dict(base.state_dict())
    folder = tmp_path_factory.mktemp("moh")
    model.save_pretrained(folder)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, folder)
    base = json.dumps({"base": open_base(str(tiny_llama)).identity()})
    (folder / "conversion.json").write_text(base)
    return folder
