"""Folders of training runs, written by hand."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Line = dict[str, Any]
TOKENS = 2 * 16  # per step


def _log_lines(steps: int, every: int, scale: float) -> list[Line]:
    """A log whose numbers follow from ``scale``: a score at step 0 and every ``every`` steps."""
    lines: list[Line] = []
    for step in range(steps + 1):
        line: Line = {"step": step}
        if step:
            kl = scale / (step + 1)
            line |= {"loss": kl + 0.01, "kl": kl, "cross_entropy": 3 + math.sin(step * scale), "balance_loss": 1.0}
            line |= {"learning_rate": 1e-4 / step, "router_learning_rate": 1e-3 / step, "gradient_norm": 1 + kl}
            line |= {"tokens": step * TOKENS, "heads_asked": 2.0, "heads_read": 2.5}
            line["timing"] = {"seconds": 0.25 * step, "tokens_per_second": 100.0 + step}
        if step % every == 0:
            ratio = 1 + scale / (step + 1)
            line["validation"] = {"tokens": 512, "perplexity": 20 * ratio, "reference_perplexity": 20.0}
            line["validation"] |= {"documents": 12, "ratio_interval": [ratio - 0.01, ratio + 0.02]}
            line["validation"] |= {
                "kl_interval": None,
                "kl": scale / (step + 2),
                "top1_agreement": 1 - 0.1 * scale / (step + 1),
            }
        lines.append(line)
    return lines


@pytest.fixture
def log_lines() -> Callable[[int, int, float], list[Line]]:
    """`_log_lines`, for logs that a test changes."""
    return _log_lines


@pytest.fixture
def routing() -> Callable[..., Line]:
    """Router health with given loads and changes."""

    def make(load: Sequence[Sequence[float]], changed: Sequence[float] | None) -> Line:
        return {
            "load": load,
            "entropy": [0.9 - 0.1 * index if layer else None for index, layer in enumerate(load)],
            "dead_heads": [sum(share == 0 for share in layer) for layer in load],
            "changed": changed,
        }

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run's folder `tmp_path/NAME` and return it; `recipe` holds keys beside the usual ones.

    `lines` replaces the log that `log_lines` would make, `tail` is put behind it, `record` adds to run.json.
    """

    def make(
        name: str,
        seed: int = 0,
        steps: int = 6,
        every: int = 3,
        scale: float = 0.3,
        lines: list[Line] | None = None,
        tail: str = "",
        recipe: Line | None = None,
        record: Line | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config: Line = {"model": "out/moh", "output_dir": str(folder), "max_steps": 6, "seed": seed}
        config |= {"data": {"mixture": "tiny.yaml", "sequence_length": 16, "batch_size": 2}} | (recipe or {})
        facts = {"status": "finished", "config": config, "model": {"sha256": "ab"}, "data": {"one": {"tokens": 9}}}
        facts["reference"] = {"kind": "base"}
        (folder / "run.json").write_text(json.dumps(facts | {"device": "cpu", "processes": 1} | (record or {})))
        log = _log_lines(steps, every, scale) if lines is None else lines
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log) + tail)
        return folder

    return make


@pytest.fixture(scope="session")
def analysis(make_model: Callable[..., Path]) -> Line:
    """The analysis of a tiny MoH model on two texts."""
    from transformers import AutoTokenizer

    from moh_llm.analysis.record import analyse
    from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

    heads = {"num_shared_heads": 1, "num_active_heads": 3, "router_type": "linear", "num_hidden_layers": 3}
    folder = make_model(MoHLlamaConfig, max_position_embeddings=256, **heads)
    model, texts = MoHLlamaForCausalLM.from_pretrained(folder).eval(), {"A": ["Why <b>?"] * 9, "B": ["0 1 2 3"] * 9}
    return analyse(model, AutoTokenizer.from_pretrained(folder), texts, sentence="Tea & <milk>", tokens_per_text=64)
