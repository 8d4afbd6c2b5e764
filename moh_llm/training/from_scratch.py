"""Models to train from scratch: an architecture file, for text also a tokenizer, makes a folder of random weights."""

import difflib
from dataclasses import fields
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig

from moh_llm.data.tokenizer import TextTokenizer, open_tokenizer
from moh_llm.errors import UserError, reason
from moh_llm.files import check_output_folder, new_folder
from moh_llm.locking import lock_folder
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.reading import read_yaml
from moh_llm.records.identity import hash_model
from moh_llm.records.seal import write_seal

# Without these a file would silently describe a model of another size.
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def architecture_keys() -> set[str]:
    """The keys of an architecture file: the fields of `MoHLlamaConfig` that define the network."""
    general = {field.name for field in fields(PreTrainedConfig)}
    return {field.name for field in fields(MoHLlamaConfig)} - general - set(_TOKEN_IDS)


def read_architecture(path: Path) -> MoHLlamaConfig:
    """The config that an architecture file describes, still without a tokenizer's ids.

    Raises:
        UserError: the file cannot be read, a key is unknown (the nearest known one is named) or missing, or the values
            make no model.
    """
    known, values = architecture_keys(), read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"architecture {path} must hold `key: value` lines")
    for name in values:
        if name in _TOKEN_IDS:
            raise UserError(f"{path}: {name} is taken from the tokenizer; remove it")
        if name not in known:
            nearest = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.0)[0]
            raise UserError(f"{path}: unknown key {name!r}; the nearest known key is {nearest!r}")
    if absent := [name for name in NEEDED if name not in values]:
        raise UserError(f"{path} lacks {', '.join(absent)}; give each a number")
    try:
        config = MoHLlamaConfig(**values, **dict.fromkeys(_TOKEN_IDS))  # which checks the types
        config.validate()
        # transformers accepts these two, and fails in the first forward pass.
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        if heads % groups:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}")
        if config.head_dim % 2:
            raise ValueError(f"head_dim={config.head_dim} must be even: rotary embedding turns pairs")
        with torch.device("meta"):
            MoHLlamaForCausalLM(config)
    except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        # A failed lookup, as of an activation, says no more than the name.
        why = f"{error} is not known" if isinstance(error, KeyError) else reason(error).rsplit("Error: ", 1)[-1]
        raise UserError(f"{path} makes no model: {why}") from error
    return config


def initialise(architecture: Path, tokenizer: str, output: Path, seed: int, overwrite: bool) -> MoHLlamaForCausalLM:
    """Write a model of random weights as a folder that training starts from, and return the model.

    Weights are drawn in float32 on the CPU, which depends on `seed` alone. ``architecture`` is a YAML file of
    `architecture_keys`; the ids of special tokens are those of ``tokenizer``, a folder or Hub id.

    Raises:
        UserError: an input cannot be used, ``output`` is in the way, or the disk refuses.
    """
    check_output_folder(output, overwrite, [architecture, tokenizer])
    config, loaded = read_architecture(architecture), open_tokenizer(tokenizer)
    ids = TextTokenizer.from_tokenizer(loaded).vocab_size
    if config.vocab_size < ids:
        small = f"vocab_size={config.vocab_size} is less than the {ids} ids of tokenizer {tokenizer}"
        raise UserError(f"{architecture}: {small}; raise it or name a smaller tokenizer")
    config.bos_token_id, config.eos_token_id = loaded.bos_token_id, loaded.eos_token_id
    # The embedding of a padding token is never trained, so one with another use must not count as padding.
    if loaded.pad_token_id not in (loaded.bos_token_id, loaded.eos_token_id):
        config.pad_token_id = loaded.pad_token_id

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MoHLlamaForCausalLM(config)
    with lock_folder(output), new_folder(output, overwrite) as temporary:
        try:
            model.save_pretrained(temporary)
        except SafetensorError as error:  # how the library reports a full disk
            raise UserError(f"cannot write {output} ({error}); free some space or name another place") from error
        loaded.save_pretrained(temporary)
        write_seal(temporary, hash_model(temporary))
    return model


def initialise_images(architecture: Path, output: Path, seed: int, overwrite: bool) -> torch.nn.Module:
    """Write a model of random weights as a folder that training starts from, and return the model.

    The file has the arguments of a MoH-DiT, or a ``model_type``, such as moh_vit or the dense vit, and fields of its
    configuration. As in DiT's code, and other than in diffusers, adaLN and the output layers start at zero.

    Raises:
        UserError: the file makes no model, ``output`` is in the way, or the disk refuses.
    """
    from moh_llm import vision  # needs a newer transformers than text

    check_output_folder(output, overwrite, [architecture])
    values = read_yaml(architecture)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if "model_type" in values:
                config = AutoConfig.for_model(**values)
                if unknown := values.keys() - {field.name for field in fields(config)} - {"num_labels", "model_type"}:
                    raise ValueError(f"unknown key {min(unknown)!r}")
                if (heads := config.num_attention_heads) < 1 or config.hidden_size % heads:
                    raise ValueError(f"hidden_size must be a multiple of num_attention_heads={heads}")
                network = AutoModelForImageClassification.from_config(config)
            else:
                network = vision.MoHDiTTransformer2DModel(**values)
                adaptive = [block.norm1.linear for block in network.transformer_blocks]
                for layer in (*adaptive, network.proj_out_1, network.proj_out_2):
                    torch.nn.init.zeros_(layer.weight)
                    torch.nn.init.zeros_(layer.bias)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"{architecture} makes no model: {reason(error)}") from error
    with lock_folder(output), new_folder(output, overwrite) as temporary:
        network.save_pretrained(temporary)
        write_seal(temporary, hash_model(temporary))
    return network
