"""Retrieval prompts: who sees everything is right, and who sees d tokens is right up to a distance of d."""

import pytest
import torch
from transformers import AutoTokenizer

from moh_llm.analysis.retrieval import TASKS, make_prompt, score

DISTANCES = [512, 1024, 1500]


@pytest.fixture
def tokenizer(byte_tokenizer, tmp_path):
    byte_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def reader(sight: int):
    """Predicts what followed the last six tokens where they stood before, if that is at most `sight` tokens back."""

    def most_likely(ids: list[int], positions: list[int]) -> torch.Tensor:
        found = []
        for at in positions:
            ends = [e for e in range(max(at - sight, 5), at) if ids[e - 5 : e + 1] == ids[at - 5 : at + 1]]
            found.append(ids[ends[-1] + 1] if ends else -1)
        return torch.tensor(found)

    return most_likely


@pytest.mark.parametrize("sight", [3000, 1024, 1023, 100])
def test_what_is_in_sight_is_found(tokenizer, sight):
    prompt = make_prompt([7] * 3000 + list(range(40, 90)), 3050, DISTANCES, tokenizer, seed=0)
    assert len(prompt.ids) == 3050
    counts = score(prompt, reader(sight))
    assert list(counts) == list(TASKS)
    for task in TASKS:
        of_each = 24 if task == "copying" else 1
        assert counts[task] == {d: [of_each * (d <= sight), of_each] for d in DISTANCES}


@pytest.mark.parametrize(
    ("length", "distances", "message"),
    [(900, [512, 1024], "1024 does not fit"), (3000, [512, 630], "too close together")],
)
def test_what_does_not_fit_is_named(tokenizer, length, distances, message):
    with pytest.raises(ValueError, match=message):
        make_prompt(list(range(40, 90)) * 60, length, distances, tokenizer, seed=0)
