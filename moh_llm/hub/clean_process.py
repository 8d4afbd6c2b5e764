"""What a stranger does with a published model: load it by its own code, compute logits, generate.

`moh_llm.hub.proof` runs this file as a script, in a process that finds torch, transformers and the
folder, and no `moh_llm`; so it imports nothing of ours. The same functions then serve to compute
what the local model gives.

    python -I clean_process.py REQUEST.json

REQUEST.json holds `folder`, `threads`, `tensors` and `record`: the model, the number of threads, and
where to write the tensors and the record.
"""

import gc
import importlib.abc
import json
import sys
from typing import Any

TEXTS = (
    "The river was high that spring, and the boats lay tied to the poplars below the mill.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich: 3.14159, 2.71828.",
)
MAX_TOKENS, NEW_TOKENS = 64, 16


class Blocked(importlib.abc.MetaPathFinder):
    """Makes a package impossible to import, installed or not."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Refuse the package, and leave all others to the other finders."""
        if fullname.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {fullname!r} (blocked)", name=fullname)


def encode(tokenizer: Any, max_position_embeddings: int) -> dict[str, Any]:
    """The texts as one batch padded on the left: `input_ids` and `attention_mask`, each `[texts, tokens]`."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side, tokenizer.truncation_side = "left", "right"
    length = max(1, min(MAX_TOKENS, max_position_embeddings - NEW_TOKENS))
    batch = tokenizer(list(TEXTS), padding=True, truncation=True, max_length=length, return_tensors="pt")
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def observe(model: Any, batch: dict[str, Any], pad_token_id: int | None) -> dict[str, Any]:
    """What a causal LM makes of a batch: logits of each text alone, of the texts in the batch, and generated tokens."""
    import torch

    mask = batch["attention_mask"].bool()
    tensors = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    model.eval()
    with torch.no_grad():
        for i, ids in enumerate(batch["input_ids"]):
            tensors[f"logits.{i}"] = model(input_ids=ids[mask[i]][None]).logits[0]
        tensors["logits.batch"] = model(**batch).logits[mask]
        tensors["generated"] = model.generate(
            **batch, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1, pad_token_id=pad_token_id
        )
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def observe_base(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What the model without its head makes of the first text."""
    import torch

    ids = batch["input_ids"][0][batch["attention_mask"][0].bool()][None]
    with torch.no_grad():
        return {"hidden": model.eval()(input_ids=ids).last_hidden_state[0].contiguous().clone()}


def main(request: dict[str, Any]) -> None:
    """Load by remote code, and write what was seen."""
    sys.meta_path.insert(0, Blocked("moh_llm"))
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(request["threads"])
    folder, options = request["folder"], {"trust_remote_code": True}
    config = AutoConfig.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    batch = encode(tokenizer, config.max_position_embeddings)
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
    del model  # one at a time in memory
    gc.collect()
    model = AutoModel.from_pretrained(folder, dtype="auto", **options)
    tensors |= observe_base(model, batch)
    record["classes"]["base"] = type(model).__module__
    save_file(tensors, request["tensors"])
    with open(request["record"], "w", encoding="utf-8") as file:
        json.dump(record, file)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as request_file:
        main(json.load(request_file))
