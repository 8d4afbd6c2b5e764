"""Tiny random models with a byte tokenizer; `python tests/tiny.py FOLDER` writes a LLaMA for `make quickstart`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EOS = "<end>"


def save_byte_tokenizer(folder: Path) -> int:
    """Write a tokenizer with one token per byte and an end-of-text token 0; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = [EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS).save_pretrained(folder)
    return len(alphabet)


def save_wider_tokenizer(folder: Path) -> None:
    """Write that tokenizer with "th" and "the", by merges, " mill", an added token, and "<|user|>", a special one."""
    from transformers import AutoTokenizer

    size = save_byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {"th": size, "the": size + 1}
    content["model"]["merges"] = [["t", "h"], ["th", "e"]]
    path.write_text(json.dumps(content))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([" mill"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)


def save_model(
    folder: Path,
    config_class: "type[PreTrainedConfig]",
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    vectors: bool = True,
    **fields: object,
) -> None:
    """Write a random model of a config class with a byte tokenizer; `fields` override the config's.

    Weights are drawn wide, so that a head that is off is felt, and with `vectors` biases and norms,
    too, so that one that is lost is.
    """
    from transformers import AutoModelForCausalLM

    vocab_size = save_byte_tokenizer(folder)
    defaults = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**(defaults | fields)))
    if vectors:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)


if __name__ == "__main__":
    from transformers import LlamaConfig

    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    save_model(target, LlamaConfig, vectors=False, max_position_embeddings=512)
    (target / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n\nA random model.\n")
