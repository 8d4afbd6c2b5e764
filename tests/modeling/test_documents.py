"""Where documents begin and what padding hides, by transformers' own masks."""

import random

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.masking_utils import create_causal_mask

from moh_llm.modeling.seen_moh import seen_keys


def drawn_case(draw: random.Random) -> dict:
    """Arguments of one call: some padding or none, some documents or one, some keys in a cache or none."""
    batch, length, before = draw.randint(1, 3), draw.randint(1, 8), draw.choice([0, 0, 1, 5])
    past = None
    if before or draw.random() < 0.3:
        past = DynamicCache()
        if before:
            past.update(torch.zeros(batch, 1, before, 2), torch.zeros(batch, 1, before, 2), 0)
    mask = positions = None
    if draw.random() < 0.6:
        mask = torch.ones(batch, before + length, dtype=draw.choice([torch.int64, torch.bool, torch.float32]))
        for row in mask:
            row[: draw.randint(0, before + length)] = 0
            if draw.random() < 0.3:
                row[draw.randrange(before + length) :] = 0
    if draw.random() < 0.7:
        begins = [[draw.random() < 0.3 for _ in range(length)] for _ in range(draw.choice([1, batch]))]
        positions = torch.tensor([[draw.randint(0, 3)] * length for _ in begins])
        for row, begin in zip(positions, begins, strict=True):
            for place in range(1, length):
                row[place] = draw.randint(0, 3) if begin[place] else row[place - 1] + 1
    return {"inputs": torch.zeros(batch, length, 4), "mask": mask, "positions": positions, "past": past}


def first_tokens(*args: object) -> torch.Tensor:
    """Whether a token is the first that attention shows it, `[B or 1, T]`; arguments are those of `seen_keys`."""
    seen = seen_keys(*args, 0, 0, 0)
    return (seen.start == seen.last).all(-1)


def test_first_tokens_are_those_that_transformers_masks_show_themselves_only():
    config = LlamaConfig(hidden_size=4, num_attention_heads=1, num_hidden_layers=1)
    draw, seen = random.Random(0), set()
    for _ in range(400):
        case = drawn_case(draw)
        inputs, mask, positions, past = case["inputs"], case["mask"], case["positions"], case["past"]
        for implementation in ("eager", "sdpa"):
            config._attn_implementation = implementation
            whole = create_causal_mask(config, inputs, mask, past, positions, allow_is_causal_skip=False)
            visible = (whole if implementation == "sdpa" else whole == 0).expand(inputs.shape[0], -1, -1, -1)[:, 0]
            real = visible.any(-1)
            if mask is not None:
                real &= mask[:, -inputs.shape[1] :] != 0
            expected = visible.sum(-1) == 1
            got = first_tokens(inputs, mask, positions, past, False, implementation).expand_as(expected)
            assert torch.equal(got & real, expected & real), case
            got = first_tokens(inputs, whole, positions, past, False, implementation).expand_as(expected)
            assert torch.equal(got & real, expected & real), case
            if mask is None and past is None:
                starts = seen_keys(inputs, mask, positions, past, False, implementation, 0, 0, 0).start[..., 0]
                assert torch.equal(starts.expand_as(expected), visible.int().argmax(-1))
        seen.add((mask is None, past is None, positions is None, bool(expected[:, 1:].any())))
    assert len(seen) >= 12  # of what is drawn each kind came


@pytest.mark.parametrize(
    ("rows", "use_cache", "implementation", "expected"),
    [
        (1, False, "sdpa", [0, 2, 4, 5]),
        (1, True, "sdpa", [0]),  # a call that makes a cache does not tell documents apart
        (1, False, "flash_attention_2", [0, 2, 4, 5]),  # of a single row it does
        (1, True, "flash_attention_2", [0, 2, 4, 5]),
        (2, True, "flash_attention_2", [0]),
        (1, False, "an engine's", [2]),  # keys are kept elsewhere: a chunk, a new request, two that decode
    ],
)
def test_what_tells_documents_apart(rows, use_cache, implementation, expected):
    positions = torch.tensor([[8, 9, 0, 1, 30, 5]])
    got = first_tokens(torch.zeros(rows, 6), None, positions, None, use_cache, implementation)
    assert got.nonzero()[:, 1].tolist() == expected
