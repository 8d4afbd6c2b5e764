"""Retrieval prompts: who sees everything is right, and who sees d tokens is right up to a distance of d."""

import math

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
    """Adds two to the logit of what followed the last six tokens, if that is at most `sight` tokens back."""

    def logits_at(ids: list[int], positions: list[int]) -> torch.Tensor:
        logits = torch.zeros(len(positions), 256)
        logits[:, 0] = 1
        for row, at in zip(logits, positions, strict=True):
            ends = [e for e in range(max(at - sight, 5), at) if ids[e - 5 : e + 1] == ids[at - 5 : at + 1]]
            if ends:
                row[ids[ends[-1] + 1]] += 2
        return logits

    return logits_at


@pytest.mark.parametrize("tasks", [TASKS, TASKS[1:2]])
@pytest.mark.parametrize("sight", [3000, 1024, 1023, 100])
def test_what_is_in_sight_is_found(tokenizer, sight, tasks):
    prompt = make_prompt([7] * 3000 + list(range(40, 90)), 3050, DISTANCES, tokenizer, 0, tasks)
    assert len(prompt.ids) == 3050 and len(prompt.answers) == len(DISTANCES) * len(tasks)
    counts = score(prompt, reader(sight))
    assert tuple(counts) == tasks
    total = math.log(254 + math.e + math.e**2)
    for answer in prompt.answers:
        tokens, seen = answer.stop - answer.start, answer.distance <= sight
        of_each = tokens if answer.task == "copying" else 1
        nats = tokens * (2 - total) if seen else -tokens * math.log(255 + math.e)
        assert counts[answer.task][answer.distance] == pytest.approx([of_each * seen, of_each, nats])


def test_an_answer_with_one_wrong_token_is_wrong(tokenizer):
    prompt = make_prompt([7] * 3000 + list(range(40, 90)), 3050, DISTANCES, tokenizer, 0, TASKS)
    first, *others = (answer for answer in prompt.answers if answer.task == "uuid")

    def logits_at(ids: list[int], positions: list[int]) -> torch.Tensor:
        logits = reader(3000)(ids, positions)
        logits[positions.index(first.stop - 2)] = 0  # of its last token
        return logits

    counts = score(prompt, logits_at)["uuid"]
    assert counts[first.distance][:2] == [0, 1] and all(counts[other.distance][:2] == [1, 1] for other in others)


@pytest.mark.parametrize(
    ("length", "distances", "message"),
    [(1100, [512, 1024], "1024 does not fit"), (3000, [512, 630], "too close together")],
)
def test_what_does_not_fit_is_named(tokenizer, length, distances, message):
    with pytest.raises(ValueError, match=message):
        make_prompt(list(range(40, 90)) * 60, length, distances, tokenizer, 0, TASKS)
