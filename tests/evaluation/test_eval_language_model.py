"""The batch size from the longest request and the free memory, lowered when memory runs out; and the time left."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moh_llm.errors import UserError
from moh_llm.evaluation.processes import Team
from moh_llm.evaluation.runner import Progress, score, spell_seconds
from moh_llm.evaluation.suite import load_suite

pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM

from moh_llm.evaluation import language_model


@pytest.fixture
def llama() -> Any:
    from transformers import LlamaConfig

    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    return LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192)


def choose(llama: Any, monkeypatch: pytest.MonkeyPatch, free: float, tokens: int, scored: int, kind: str) -> int:
    monkeypatch.setattr(language_model, "free_memory", lambda device: int(free))
    return language_model.choose_batch_size(llama, torch.bfloat16, torch.device(kind), tokens, scored)


def test_batches_fit_the_free_memory(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for free in (1e9, 8e9, 60e9):
        for tokens in (40, 500, 2000):
            size = choose(llama, monkeypatch, free, tokens, tokens, "cuda")
            taken = language_model.bytes_per_sequence(llama, 2, tokens, tokens)
            assert size == 1 or size * taken <= 0.6 * free
            assert size == 64 or 2 * size * taken > 0.6 * free
            assert size & (size - 1) == 0
    assert choose(llama, monkeypatch, 0, 2000, 2000, "cuda") == 1
    # Generation keeps the logits of one token only.
    assert choose(llama, monkeypatch, 20e9, 2000, 1, "cuda") > choose(llama, monkeypatch, 20e9, 2000, 2000, "cuda")


def test_batches_shrink_when_memory_runs_out(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of a GPU and in those of a CPU."""
    whole, sizes = HFLM._model_call, []
    said = ["CUDA out of memory. Tried", "DefaultCPUAllocator: can't allocate memory"]
    errors = itertools.cycle([torch.OutOfMemoryError(said[0]), RuntimeError(said[1])])

    def call(self: HFLM, inputs: torch.Tensor, *rest: Any) -> Any:
        sizes.append(len(inputs))
        if len(inputs) > 5:
            raise next(errors)
        return whole(self, inputs, *rest)

    suite = load_suite("smoke")
    plain = score({"model": str(tiny_llama)}, suite, limit=5, batch_size=4, device="cpu")["model"]
    monkeypatch.setattr(HFLM, "_model_call", call)
    found = score({"model": str(tiny_llama)}, suite, limit=5, batch_size="auto", device="cpu")["model"]
    assert not found.errors
    assert sizes[1] > 5 and 1 < found.scores["Facts"].batch_size <= 5
    assert {n: s.strata for n, s in found.scores.items()} == {n: s.strata for n, s in plain.scores.items()}


def test_tokens_without_a_row(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Padding is another token, and text that holds one is refused in words."""
    from transformers import AutoConfig, AutoTokenizer

    folder, rows = shutil.copytree(tiny_llama, tmp_path / "model"), AutoConfig.from_pretrained(tiny_llama).vocab_size
    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    assert size <= rows
    tokenizer.add_tokens([f"<{number}>" for number in range(size, rows)])
    tokenizer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<|user|>"]})
    tokenizer.save_pretrained(folder)
    lm = language_model.load_model(str(folder), 2, "float32", "cpu", Team())
    assert tokenizer.pad_token_id >= rows > lm.tokenizer.pad_token_id
    assert "'<|user|>'" in capsys.readouterr().err
    ids, _ = lm.tok_batch_encode(["a river", "a"])
    assert int(ids.max()) < rows
    for encode, text in ((lm.tok_encode, "a <|user|>"), (lm.tok_batch_encode, ["a", "<|user|>"])):
        with pytest.raises(UserError, match=r"'<\|user\|>'"):
            encode(text)


def test_time_left_is_that_of_the_items_so_far() -> None:
    progress = Progress(80)
    assert progress.seconds_left == 0
    progress.add(10, 5.0)
    assert progress.seconds_left == pytest.approx(70 * 0.5)
    progress.add(30, None)  # failed: it says nothing about time
    assert progress.seconds_left == pytest.approx(40 * 0.5)
    progress.add(40, 20.0)
    assert progress.seconds_left == 0
    spelt = {8.4: "8 s", 99: "99 s", 840: "14 min", 12000: "3 h 20 min"}
    assert {seconds: spell_seconds(seconds) for seconds in spelt} == spelt
