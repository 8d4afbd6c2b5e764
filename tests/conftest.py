"""What all tests share: tiny random LLaMAs with a byte tokenizer, made in temporary folders."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[[Path], int]:
    """`save_byte_tokenizer`, for the folders below."""
    return save_byte_tokenizer


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data that some workplaces hold beside the checkout."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random LLaMA with a byte tokenizer and return its folder; keywords are config fields.

    `dtype` and `max_shard_size` go to saving. Weights are drawn wide, so that a head that is off is felt.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **fields: object) -> Path:
        folder = tmp_path_factory.mktemp("llama")
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
        model = LlamaForCausalLM(LlamaConfig(**(defaults | fields)))
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are split over threads, so equal bits need equal numbers of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
