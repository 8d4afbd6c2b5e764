"""Batches that shrink when memory runs out, and tokens without a row in the embedding."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moh_llm.errors import UserError
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.processes import Team
from moh_llm.evaluation.runner import score
from moh_llm.evaluation.suite import load_suite

pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM

from moh_llm.evaluation import language_model


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
    options = EvaluationConfig(str(tiny_llama), limit=5, batch_size=4, device="cpu")
    plain = score({"model": str(tiny_llama)}, suite, options)["model"]
    monkeypatch.setattr(HFLM, "_model_call", call)
    found = score({"model": str(tiny_llama)}, suite, replace(options, batch_size="auto"))["model"]
    assert not found.errors
    assert sizes[:4] == [8, 7, 6, 5]
    assert {n: s.strata for n, s in found.scores.items()} == {n: s.strata for n, s in plain.scores.items()}


def test_tokens_without_a_row(tiny_llama: Path, tmp_path: Path) -> None:
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
    ids, _ = lm.tok_batch_encode(["a river", "a"])
    assert int(ids.max()) < rows
    user = torch.tensor([[1, tokenizer.convert_tokens_to_ids("<|user|>")]])
    for run in (lm._model_call, lambda ids: lm._model_generate(ids, max_length=4, stop=[])):
        with pytest.raises(UserError, match=r"'<\|user\|>'"):
            run(user)


def test_a_model_that_computes_no_numbers_has_no_scores(tiny_llama: Path, tmp_path: Path) -> None:
    """lm-eval would choose answers by NaN, and score them."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    suite, options = load_suite("smoke"), EvaluationConfig(str(folder), limit=2, device="cpu")
    found = score({"model": str(folder)}, suite, options)["model"]
    assert not found.scores and len(found.errors) == len(suite.benchmarks) > 2  # one of them is generated
    assert all("not finite; --compute-dtype float32 may help" in error for error in found.errors.values())
