"""The proof that a folder works for whoever has torch and transformers only, and gives what the local model gives."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moh_llm.addresses import reason
from moh_llm.errors import UserError
from moh_llm.hub import clean_process
from moh_llm.hub.clean_process import encode, observe, observe_base

# What could lead the clean process to something of this user's: caches, logins, paths, settings of libraries.
_DROPPED = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTHON", "XDG_")


@dataclass(frozen=True)
class Proof:
    """Attributes:
    failure: why the folder does not do, in one line; None where it does.
    record: what was compared: dtype, texts, tokens, the text generated, versions, seconds.
    """

    failure: str | None
    record: dict[str, Any] = field(default_factory=dict)


def prove(published: Path, local: Path) -> Proof:
    """Load a folder in a clean process by its own code, and compare with the local model by ours, bit for bit.

    The clean process has an empty cache and working folder, no network and no `moh_llm`. Logits of
    texts alone and in a padded batch, hidden states of the base model and greedily generated tokens
    must be equal. The processes follow each other, and each holds one model at a time, on the CPU.

    A weight that moves no bit of these outputs goes unnoticed: embeddings of tokens that no text holds, and a
    router's by too little to switch a head. `upload` compares the files that were sent by their hashes.

    Args:
        published: the folder to be published, whose code is run: see `moh_llm.hub.checks.other_code`.
        local: the model that it must equal; of its code nothing is run.

    Raises:
        UserError: the temporary folder is full, or was removed.
    """
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="moh-llm-proof-") as scratch:
            record, failure = _run_clean(published.resolve(), Path(scratch))
            if failure is None:
                failure = _fault(record) or _compare(Path(scratch) / "seen.safetensors", local)
    except OSError as error:
        where = tempfile.gettempdir()
        why = error.strerror or str(error)
        raise UserError(f"the proof cannot use its temporary folder in {where}: {why}; try again") from error
    record["seconds"] = round(time.perf_counter() - started, 1)
    return Proof(failure, record)


def _run_clean(folder: Path, scratch: Path) -> tuple[dict[str, Any], str | None]:
    """The record of the clean process, and why it failed, if it did."""
    import torch

    for name in ("empty", "cache"):
        (scratch / name).mkdir()
    request = {
        "folder": str(folder),
        "threads": torch.get_num_threads(),
        "tensors": str(scratch / "seen.safetensors"),
        "record": str(scratch / "seen.json"),
    }
    (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    environment |= {
        "HF_HOME": str(scratch / "cache"),
        "HF_MODULES_CACHE": str(scratch / "cache" / "modules"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-I", clean_process.__file__, str(scratch / "request.json")]
    done = subprocess.run(
        command, cwd=scratch / "empty", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode < 0:
        return {}, f"the clean process was killed by signal {-done.returncode}; is there memory for the model?"
    if done.returncode:
        return {}, f"it does not load in a clean process: {_last_error(done.stderr)}"
    return json.loads((scratch / "seen.json").read_text(encoding="utf-8")), None


def _last_error(output: str) -> str:
    """The exception at the end of a traceback, on one line."""
    lines = output.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line and not line[0].isspace() and ":" in line]
    return " ".join(" ".join(lines[starts[-1] :] if starts else lines[-1:]).split())[:400] or "no reason was given"


def _fault(record: dict[str, Any]) -> str | None:
    """What the clean process itself saw go wrong."""
    for role, module in record["classes"].items():
        if not module.startswith("transformers_modules."):
            return f"the class of its {role} came from {module}, not from the folder's own code"
    for key, names in record["loading"].items():
        return f"loading gave {key.replace('_', ' ')}: {', '.join(names[:3])}"
    return None


def _compare(seen: Path, local: Path) -> str | None:
    """How the local model differs from what the clean process saw; None where every bit is equal."""
    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from moh_llm.modeling import MoHLlamaForCausalLM

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = MoHLlamaForCausalLM.from_pretrained(local, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(local, trust_remote_code=False)
    # A stray adapter, damaged weights, a tokenizer with code of its own: each an error of its own kind.
    except Exception as error:
        return f"the local model does not load: {reason(error)[:400]}"
    finally:
        if bars:
            logging.enable_progress_bar()
    batch = encode(tokenizer, model.config.max_position_embeddings)
    ours = observe(model, batch, tokenizer.pad_token_id) | observe_base(model.model, batch)
    with safe_open(seen, framework="pt") as file:
        for name, here in ours.items():
            there = file.get_tensor(name)
            if there.shape != here.shape or there.dtype != here.dtype:
                return f"{name} is {_form(there)} in the clean process and {_form(here)} here"
            if here.is_floating_point() and not here.isfinite().all():
                return f"{name} of the local model holds NaN or infinity"
            if not torch.equal(there, here):
                return f"{name} differs from the local model's by up to {(there - here).abs().max().item():.3g}"
    return None


def _form(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
