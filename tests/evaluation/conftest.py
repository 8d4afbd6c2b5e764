"""A tiny random LLaMA and its conversions, by default and by the paper, with the context that few-shot prompts need."""

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import save_model


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


@pytest.fixture(autouse=True)
def pictures(unrendered: None) -> None:
    """No test here looks at them."""


@pytest.fixture(scope="session")
def tiny_llama(made_once: Callable[..., Path]) -> Path:
    """A random LLaMA (2 layers, 8 heads, hidden 64) with its tokenizer, whose layers lose unlike shares of heads."""
    from transformers import LlamaConfig

    fields = {"num_attention_heads": 8, "hidden_size": 64, "max_position_embeddings": 2048, "initializer_range": 0.1}
    return made_once("tiny_llama", lambda folder: save_model(folder, LlamaConfig, vectors=False, **fields))


@pytest.fixture(scope="session")
def tiny_moh(tiny_llama: Path, convert: Callable[..., int], made_once: Callable[..., Path]) -> Path:
    """The tiny LLaMA as `moh-llm convert` makes it for short texts, which local fallbacks leave as they are."""
    flags = ["--context", "512", "--heldout-tokens", "0"]
    folder = made_once("tiny_moh", lambda folder: convert(tiny_llama, folder / "moh", *flags)) / "moh"
    config = json.loads((folder / "config.json").read_text())
    assert (config["router_type"], config["head_fallback"]) == ("linear", "value")
    fewer, more = sorted(config["num_active_heads"])
    assert config["num_shared_heads"] < fewer < more < 8  # uneven, and both layers choose
    return folder


@pytest.fixture(scope="session")
def paper_moh(tiny_llama: Path, convert: Callable[..., int], made_once: Callable[..., Path]) -> Path:
    """The tiny LLaMA with the paper's layer (query norm, half of the heads shared, 6 of 8 on), not to be changed."""
    flags = ["--preset", "paper", "--heldout-tokens", "0"]
    return made_once("paper_moh", lambda folder: convert(tiny_llama, folder / "moh", *flags)) / "moh"


@pytest.fixture(scope="session")
def smoke_report(
    tiny_llama: Path, tiny_moh: Path, run_evaluate: Callable[..., int], made_once: Callable[..., Path]
) -> Path:
    """What evaluating the tiny models on the smoke suite writes, with what it prints in `out.txt` and `err.txt`."""

    def make(folder: Path) -> None:
        words = [tiny_moh, "--base", tiny_llama, "--suite", "smoke", "--batch-size", "3", "--device", "cpu"]
        with contextlib.ExitStack() as streams:
            for name, redirect in (("out", contextlib.redirect_stdout), ("err", contextlib.redirect_stderr)):
                streams.enter_context(redirect(streams.enter_context((folder / f"{name}.txt").open("w"))))
            assert run_evaluate(*words, "--log-samples", "--output", folder / "report") == 0

    return made_once("smoke_report", make)
