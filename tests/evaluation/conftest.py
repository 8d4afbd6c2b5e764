"""A tiny random LLaMA and a tiny MoH made from it, with the context that few-shot prompts need."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_benchmarks(shared: Path) -> Path:
    """The benchmark data among the real data beside the checkout."""
    return shared / "data" / "benchmarks"


@pytest.fixture(scope="session")
def tiny_llama(make_llama) -> Path:
    """A random LLaMA (2 layers, 4 heads, hidden 32) with its tokenizer."""
    return make_llama(max_position_embeddings=2048, initializer_range=0.3)


@pytest.fixture(scope="session")
def tiny_moh(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny LLaMA with 3 of its 4 heads active per token."""
    from transformers import LlamaForCausalLM

    from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(tiny_llama)
    shape = {key: value for key, value in base.config.to_dict().items() if key not in ("model_type", "architectures")}
    config = MoHLlamaConfig(**shape, num_shared_heads=2, num_active_heads=3, router_type="query_norm")
    model = MoHLlamaForCausalLM(config)
    model.load_state_dict(base.state_dict())
    folder = tmp_path_factory.mktemp("moh")
    model.save_pretrained(folder)
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "conversion.json").write_text("{}")
    return folder
