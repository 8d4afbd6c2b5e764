"""The proof that a folder loads with torch and transformers only, by its own code, and equals the local model.

`prove` runs this file as a script in a process without `moh_llm`: at the top it imports the standard library only.

    python -I proof.py REQUEST.json

REQUEST.json holds `folder`, `threads`, `tensors` and `record`: the model, the number of threads, and where to write
the tensors and the record.
"""

import contextlib
import importlib.abc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXTS = (
    "The river was high that spring, and the boats lay tied to the poplars below the mill.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich: 3.14159, 2.71828.",
)
MAX_TOKENS, NEW_TOKENS = 64, 16
# Variables that could lead the clean process to the user's caches, logins, packages or settings.
_DROPPED = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTHON", "XDG_")


@dataclass(frozen=True)
class Proof:
    """The result of loading a folder in a clean process.

    Attributes:
        failure: why it does not equal the local model, in one line; None if it does.
        record: what was compared: dtype, number of texts and tokens, generated texts, versions, seconds.
    """

    failure: str | None
    record: dict[str, Any] = field(default_factory=dict)


def prove(published: Path, local: Path) -> Proof:
    """Load a folder in a clean process by its own code, and compare it with the local model, bit for bit.

    The clean process has no network, no `moh_llm`, and an empty cache and working folder. Compared are the logits of
    texts alone and in a padded batch, those of a text in which heads with local fallbacks are off, and greedily
    generated tokens. The processes run one after the other, on the CPU.

    A weight that changes no bit of these outputs is not noticed: embeddings of tokens that no text holds, and a
    router's weight that changes too little to switch a head.

    Args:
        published: the folder to publish, whose code is run: see `moh_llm.hub.checks.other_code`.
        local: the model that it must equal; its code is not run.

    Raises:
        UserError: the temporary folder is full, or was removed.
    """
    from moh_llm.errors import UserError

    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="moh-llm-proof-") as scratch:
            record, failure = _run_clean(published.resolve(), Path(scratch))
            if failure is None:
                failure = loading_fault(record) or compare(Path(scratch) / "seen.safetensors", local)
    except OSError as error:
        where, why = tempfile.gettempdir(), error.strerror or str(error)
        raise UserError(f"the proof cannot use its temporary folder in {where}: {why}; try again") from error
    record["seconds"] = round(time.perf_counter() - started, 1)
    return Proof(failure, record)


def _run_clean(folder: Path, scratch: Path) -> tuple[dict[str, Any], str | None]:
    """The record of the clean process, and the reason of a failure, if any."""
    import torch

    for name in ("empty", "cache"):
        (scratch / name).mkdir()
    request = {"folder": str(folder), "threads": torch.get_num_threads()}
    request |= {"tensors": str(scratch / "seen.safetensors"), "record": str(scratch / "seen.json")}
    (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    environment |= {
        "HF_HOME": str(scratch / "cache"),
        "HF_MODULES_CACHE": str(scratch / "cache" / "modules"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-I", __file__, str(scratch / "request.json")]
    done = subprocess.run(
        command, cwd=scratch / "empty", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode < 0:
        return {}, f"the clean process was killed by signal {-done.returncode}; is there memory for the model?"
    if done.returncode:
        # The exception at the end of the traceback may have several lines.
        lines = done.stderr.rstrip().splitlines()
        starts = [i for i, line in enumerate(lines) if line and not line[0].isspace() and ":" in line]
        error = " ".join(" ".join(lines[starts[-1] if starts else -1 :]).split())[:400]
        return {}, f"it does not load in a clean process: {error or 'no reason was given'}"
    return json.loads((scratch / "seen.json").read_text(encoding="utf-8")), None


def loading_fault(record: dict[str, Any]) -> str | None:
    """What the clean process found wrong when it loaded the model; None if nothing."""
    for role, module in record["classes"].items():
        if not module.startswith("transformers_modules."):
            return f"the class of its {role} came from {module}, not from the folder's own code"
    for key, names in record["loading"].items():
        return f"loading gave {key.replace('_', ' ')}: {', '.join(names[:3])}"
    return None


def compare(seen: Path, local: Path) -> str | None:
    """How the local model differs from what the clean process saw; None if every bit is equal."""
    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from moh_llm.errors import reason
    from moh_llm.modeling import MoHLlamaForCausalLM

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = MoHLlamaForCausalLM.from_pretrained(local, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(local, trust_remote_code=False)
    # A stray adapter, damaged weights, a tokenizer with code of its own: each raises another kind of error.
    except Exception as error:
        return f"the local model does not load: {reason(error)[:400]}"
    finally:
        if bars:
            logging.enable_progress_bar()
    batch = encode(tokenizer, model.config)
    with _by_travelling_files():
        ours = observe(model, batch, tokenizer.pad_token_id)
    with safe_open(seen, framework="pt") as file:
        for name, here in ours.items():
            there = file.get_tensor(name)
            if there.shape != here.shape or there.dtype != here.dtype:
                return f"{name} is {there.dtype}{[*there.shape]} in the clean process, {here.dtype}{[*here.shape]} here"
            if here.is_floating_point() and not here.isfinite().all():
                return f"{name} of the local model holds NaN or infinity"
            if not torch.equal(there, here):
                return f"{name} differs from the local model's by up to {(there - here).abs().max().item():.3g}"
    return None


@contextlib.contextmanager
def _by_travelling_files() -> Iterator[None]:
    """Compute attention with the files that travel, as the clean process does: a backend adds in another order."""
    from transformers.modeling_utils import AttentionInterface

    from moh_llm.modeling.interval_attention_moh import NAME

    forms = AttentionInterface._global_mapping
    registered = forms.pop(NAME, None)
    try:
        yield
    finally:
        if registered is not None:
            forms[NAME] = registered


# ---- what both processes compute


def encode(tokenizer: Any, config: Any) -> dict[str, Any]:
    """The texts as one batch padded on the left: `input_ids` and `attention_mask`, each `[texts, tokens]`."""
    if tokenizer.pad_token is None or tokenizer.pad_token_id >= config.vocab_size:  # none with a row in the embedding
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side, tokenizer.truncation_side = "left", "right"
    length = max(1, min(MAX_TOKENS, config.max_position_embeddings - NEW_TOKENS))
    batch = tokenizer(list(TEXTS), padding=True, truncation=True, max_length=length, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def observe(model: Any, batch: dict[str, Any], pad_token_id: int | None) -> dict[str, Any]:
    """A causal LM's outputs: logits of each text alone, in the batch and in one long text, and generated tokens."""
    import torch

    mask = batch["attention_mask"].bool()
    tensors = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    model.eval()
    with torch.no_grad():
        for i, ids in enumerate(batch["input_ids"]):
            tensors[f"logits.{i}"] = model(input_ids=ids[mask[i]][None]).logits[0]
        tensors["logits.batch"] = model(**batch).logits[mask]
        if model.config.head_fallback == "local":  # a document's first tokens have all heads on
            length = min(model.config.all_heads_until + MAX_TOKENS, model.config.max_position_embeddings)
            ids = batch["input_ids"][mask]
            ids = ids.repeat(-(-length // len(ids)))[None, :length]
            tensors["logits.long"] = model(input_ids=ids, logits_to_keep=MAX_TOKENS).logits[0]
        tensors["generated"] = model.generate(
            **batch, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, pad_token_id=pad_token_id
        )
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


# ---- the clean process


class Blocked(importlib.abc.MetaPathFinder):
    """Refuses the import of `moh_llm`, installed or not."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raise ImportError for `moh_llm`; leave other packages to the other finders."""
        if fullname.partition(".")[0] == "moh_llm":
            raise ModuleNotFoundError(f"No module named {fullname!r} (blocked)", name=fullname)


def main(request: dict[str, Any]) -> None:
    """Load the folder by its own code, and write its outputs and a record."""
    sys.meta_path.insert(0, Blocked())
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(request["threads"])
    folder, options = request["folder"], {"trust_remote_code": True}
    config = AutoConfig.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    batch = encode(tokenizer, config)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
    tensors = observe(model, batch, tokenizer.pad_token_id)
    record = {
        "texts": len(TEXTS),
        "tokens": int(batch["attention_mask"].sum()),
        "classes": {"config": type(config).__module__, "causal_lm": type(model).__module__},
        "dtype": str(model.dtype).removeprefix("torch."),
        "loading": {key: sorted(map(str, value)) for key, value in info.items() if value},
        "generated": tokenizer.batch_decode(tensors["generated"], skip_special_tokens=True),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    save_file(tensors, request["tensors"])
    Path(request["record"]).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
