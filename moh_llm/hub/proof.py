"""The proof that a folder loads with torch and transformers only, by its own code, and equals the local model.

A DiT is loaded with diffusers and `moh_llm`, since diffusers runs no code from a model's folder.

`prove` runs this file as a script in a process without `moh_llm`: at the top it imports the standard library only.

    python -I proof.py REQUEST.json

REQUEST.json holds `folder`, `fields`, `threads`, `package`, `tensors` and `record`: the model and its config, the
number of threads, where `moh_llm` is, and where to write the tensors and the record.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXTS = (
    "The river was high that spring, and the boats lay tied to the poplars below the mill.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich: 3.14159, 2.71828.",
)
MAX_TOKENS, NEW_TOKENS = 64, 16
IMAGES, TIMESTEPS = 3, (5, 400, 900)  # a DiT sees each image at one of the timesteps
# Variables that could lead the clean process to the user's caches, logins, packages or settings.
_DROPPED = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTHON", "XDG_")


@dataclass(frozen=True)
class Proof:
    """The result of loading a folder in a clean process.

    Attributes:
        failure: why it does not equal the local model, in one line; None if it does.
        record: what was ``compared``, in words, dtype, versions, seconds, and what `loading_fault` reads.
    """

    failure: str | None
    record: dict[str, Any] = field(default_factory=dict)


def prove(published: Path, local: Path) -> Proof:
    """Load a folder in a clean process by its own code, and compare it with the local model, bit for bit.

    The clean process has no network, no `moh_llm`, and an empty cache and working folder. Compared are the logits of
    texts alone and in a padded batch, those of a text in which heads with local fallbacks are off, and greedily
    generated tokens; of a model of images all of its outputs for images alone and in a batch, and what its image
    processor makes of them. The processes run one after the other, on the CPU.

    A weight that changes no bit of these outputs is not noticed: embeddings of tokens that no text holds, and a
    router's weight that changes too little to switch a head.

    Args:
        published: the folder to publish, whose code is run: see `moh_llm.hub.checks.check_files`.
        local: the model that it must equal; its code is not run.

    Raises:
        UserError: the temporary folder is full, or was removed.
    """
    from moh_llm.errors import UserError
    from moh_llm.records.model import read_config

    fields = read_config(local)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="moh-llm-proof-") as scratch:
            record, failure = _run_clean(published.resolve(), fields, Path(scratch))
            if failure is None:
                failure = loading_fault(record) or compare(Path(scratch) / "seen.safetensors", local, fields)
    except OSError as error:
        where, why = tempfile.gettempdir(), error.strerror or str(error)
        raise UserError(f"the proof cannot use its temporary folder in {where}: {why}; try again") from error
    record["seconds"] = round(time.perf_counter() - started, 1)
    return Proof(failure, record)


def _run_clean(folder: Path, fields: dict[str, Any], scratch: Path) -> tuple[dict[str, Any], str | None]:
    """The record of the clean process, and the reason of a failure, if any."""
    import torch

    for name in ("empty", "cache"):
        (scratch / name).mkdir()
    request = {
        "folder": str(folder),
        "fields": fields,
        "threads": torch.get_num_threads(),
        "package": str(Path(__file__).parents[2]),
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


def compare(seen: Path, local: Path, fields: dict[str, Any]) -> str | None:
    """How the local model, whose config has ``fields``, differs from what was seen; None if every bit is equal."""
    import torch
    from safetensors import safe_open
    from transformers import AutoTokenizer
    from transformers.modeling_utils import AttentionInterface

    from moh_llm.errors import reason
    from moh_llm.modeling import MoHLlamaForCausalLM
    from moh_llm.modeling.interval_attention_moh import NAME

    try:
        if fields.get("model_type") == "moh_llama":
            tokenizer = AutoTokenizer.from_pretrained(local, trust_remote_code=False)
            model = MoHLlamaForCausalLM.from_pretrained(local, dtype="auto")
        else:
            from moh_llm.vision import load_model

            tokenizer, model = None, load_model(local)
            images = encode_images(local, model.config)
    # A stray adapter, damaged weights, a tokenizer with code of its own: each raises another kind of error.
    except Exception as error:
        return f"the local model does not load: {reason(error)[:400]}"
    if tokenizer is None:
        ours = observe_images(model, images)
    else:
        # By the files that travel, as in the clean process: a backend adds in another order.
        backend = AttentionInterface._global_mapping.pop(NAME)
        try:
            ours = observe(model, encode(tokenizer, model.config), tokenizer.pad_token_id)
        finally:
            AttentionInterface.register(NAME, backend)
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
    tensors = dict(batch)
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


def encode_images(folder: Path, config: Any, trust_remote_code: bool = False) -> dict[str, Any]:
    """The arguments of a model of images for `IMAGES` images: pixels `[images, C, H, W]`, and what else a DiT takes.

    The folder's image processor makes the pixels, from blots of colour; without one they are noise.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    if hasattr(config, "num_embeds_ada_norm"):
        pixels = torch.randn(IMAGES, config.in_channels, config.sample_size, config.sample_size, generator=draw)
        classes = config.num_embeds_ada_norm  # and one more number, for no class
        labels = torch.tensor([0, classes - 1, classes])
        return {"hidden_states": pixels, "timestep": torch.tensor(TIMESTEPS), "class_labels": labels}
    if not (folder / "preprocessor_config.json").is_file():
        shape = (IMAGES, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=draw)}
    from PIL import Image
    from transformers import AutoImageProcessor

    shape = (IMAGES, 5, 4) if config.num_channels == 1 else (IMAGES, 5, 4, 3)
    blots = torch.randint(256, shape, generator=draw, dtype=torch.uint8).numpy()
    images = [Image.fromarray(blot).resize((80, 100)) for blot in blots]
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=trust_remote_code)
    return {"pixel_values": processor(images, return_tensors="pt")["pixel_values"]}


def observe_images(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The arguments, and all outputs of a model of images, for each image alone and for all in a batch."""
    import torch

    model.eval()
    batch = {name: part.to(model.dtype) if part.is_floating_point() else part for name, part in batch.items()}
    parts = {str(i): {name: part[i : i + 1] for name, part in batch.items()} for i in range(IMAGES)}
    tensors = dict(batch)
    with torch.no_grad():
        for which, given in {**parts, "batch": batch}.items():
            tensors |= {f"{name}.{which}": tensor for name, tensor in model(**given).items()}
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


# ---- the clean process


def main(request: dict[str, Any]) -> None:
    """Load the folder by its own code, and write its outputs and a record."""
    folder, fields, options = Path(request["folder"]), request["fields"], {"trust_remote_code": True}
    is_text, is_dit = fields.get("model_type") == "moh_llama", "_class_name" in fields
    if is_dit:
        sys.path.append(request["package"])
    else:
        sys.modules["moh_llm"] = None  # type: ignore[assignment] # its import fails, installed or not
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.set_num_threads(request["threads"])
    if is_dit:
        from moh_llm.vision import MoHDiTTransformer2DModel as kind

        model, info = kind.from_pretrained(folder, output_loading_info=True)
    else:
        role = "ForImageClassification" if "Classification" in str(fields.get("architectures")) else ""
        kind = getattr(transformers, f"AutoModel{'ForCausalLM' if is_text else role}")
        model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
    record = {
        "classes": {} if is_dit else {"config": type(model.config).__module__, "model": type(model).__module__},
        "dtype": str(model.dtype).removeprefix("torch."),
        "loading": {key: sorted(map(str, value)) for key, value in info.items() if value},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if is_text:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        batch = encode(tokenizer, model.config)
        tensors = observe(model, batch, tokenizer.pad_token_id)
        read = f"{len(TEXTS)} texts ({int(batch['attention_mask'].sum())} tokens)"
        record["compared"] = f"the logits of {read} and the generated tokens"
    else:
        tensors = observe_images(model, encode_images(folder, model.config, trust_remote_code=True))
        record["compared"] = f"the outputs for {IMAGES} images"
    save_file(tensors, request["tensors"])
    Path(request["record"]).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
