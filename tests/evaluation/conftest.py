"""A tiny random LLaMA and its conversions, by default and by the paper, with the context that few-shot prompts need."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import save_model

Line = dict[str, Any]


@pytest.fixture
def load_rows(tmp_path: Path) -> Callable[..., Any]:
    """Load a benchmark of the paper with the given rows, without examples, and of several subjects the first."""
    pytest.importorskip("lm_eval")
    from moh_llm.evaluation.suite import Suite, load_suite
    from moh_llm.evaluation.tasks import data_file, load_tasks

    def run(name: str, rows: list[Line], limit: int | None = None, **changes: Any) -> Any:
        benchmark = next(benchmark for benchmark in load_suite("paper").benchmarks if benchmark.name == name)
        if benchmark.average != "parts":
            changes["parts"] = benchmark.parts[:1]
        benchmark = dataclasses.replace(benchmark, shots=0, fewshot_split=None, **changes)
        for part in benchmark.expand():
            file = data_file(tmp_path / "data", benchmark, part, benchmark.eval_split)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        suite = Suite("made", "Made rows", [benchmark], columns=list(benchmark.published))
        return load_tasks(suite, tmp_path / "tasks", tmp_path / "data", limit)[0]

    return run


@pytest.fixture(scope="session")
def run_evaluate() -> Callable[..., int]:
    """`moh-llm evaluate` in this process; returns the exit status, and raises what the command line would print."""
    from moh_llm.commands import evaluate
    from moh_llm.flags import OptionParser

    def run(*words: object) -> int:
        parser = OptionParser()
        evaluate.add_arguments(parser)
        args = parser.parse_args([str(word) for word in words])
        args.command_line = " ".join(["moh-llm", "evaluate", *map(str, words)])
        return evaluate.run(args)

    return run


@pytest.fixture(scope="session")
def without_times() -> Callable[[Any], Any]:
    """A report's record less all that may differ between two runs of the same work."""
    varying = {"seconds", "created", "command", "processes", "hardware"}

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
    """The tiny LLaMA as `moh-llm convert` makes it for texts of 128 tokens."""
    flags = ["--context", "128", "--keys", "0.6", "--heldout-tokens", "0"]
    folder = made_once("tiny_moh", lambda folder: convert(tiny_llama, folder / "moh", *flags)) / "moh"
    config = json.loads((folder / "config.json").read_text())
    assert (config["router_type"], config["head_fallback"]) == ("threshold", "local")
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
            assert run_evaluate(*words, "--log-samples", "--output-dir", folder / "report") == 0

    return made_once("smoke_report", make)


@pytest.fixture(scope="session")
def analysis(make_model: Callable[..., Path]) -> Line:
    """The analysis of a tiny MoH model on two texts."""
    from transformers import AutoTokenizer

    from moh_llm.analysis.heads import analyse
    from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

    heads = {"num_shared_heads": 1, "num_active_heads": 3, "router_type": "linear", "num_hidden_layers": 3}
    folder = make_model(MoHLlamaConfig, max_position_embeddings=256, **heads)
    model, texts = MoHLlamaForCausalLM.from_pretrained(folder).eval(), {"A": ["Why <b>?"] * 9, "B": ["0 1 2 3"] * 9}
    return analyse(model, AutoTokenizer.from_pretrained(folder), texts, tokens_per_text=64)
