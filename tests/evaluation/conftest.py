"""A tiny random LLaMA, a tiny MoH made from it, and a byte tokenizer, in a temporary folder."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared_benchmarks() -> Path:
    """The benchmark data that some workplaces hold beside the checkout."""
    folder = ROOT.parent / "shared" / "data" / "benchmarks"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer with one token per byte and an end-of-text token, in transformers' format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA (2 layers, 4 heads, hidden 32) with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_moh(tiny_llama: Path) -> Path:
    """The tiny LLaMA with 3 of its 4 heads active per token."""
    from transformers import LlamaForCausalLM

    from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(tiny_llama)
    shape = {key: value for key, value in base.config.to_dict().items() if key not in ("model_type", "architectures")}
    config = MoHLlamaConfig(**shape, num_shared_heads=2, num_active_heads=3, router_type="query_norm")
    model = MoHLlamaForCausalLM(config)
    model.load_state_dict(base.state_dict())
    folder = tiny_llama.parent / "moh"
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    (folder / "conversion.json").write_text("{}")
    return folder
