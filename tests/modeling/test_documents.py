"""Padding and packed documents against each document alone: by the naive loop, and by transformers' own masks."""

import random

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.masking_utils import create_causal_mask

from moh_llm.modeling.seen_moh import paged_keys, seen_keys
from tests.modeling import naive

PLAN = {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear", "head_fallback": "value"}
LOCAL = {"head_fallback": "local", "local_window": 4, "local_sinks": 3}
START = LOCAL | {"local_start": 9, "local_heads": [[3], [1, 2]], "router_type": "threshold"}
LENGTHS = [24, 17, 1, 0]


@pytest.fixture(params=[{}, LOCAL, START], ids=["value", "local", "start"])
def plan(request) -> dict:
    return PLAN | request.param


def padded_rows(ids: torch.Tensor, side: str) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """Rows of `LENGTHS` tokens and a mask, both `[4, 24]`, and where the tokens of each row are."""
    padded, mask = torch.zeros(4, 24, dtype=torch.int64), torch.zeros(4, 24, dtype=torch.int64)
    places = [slice(24 - length, 24) if side == "left" else slice(0, length) for length in LENGTHS]
    for row, place in enumerate(places[:3]):
        padded[row, place], mask[row, place] = ids[row, : LENGTHS[row]], 1
    return padded, mask, places


def four_dims(mask: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The whole mask `[B, 1, T, T]`, boolean or added to the scores."""
    seen = (mask[:, None, None, :] != 0) & torch.ones(mask.shape[1], mask.shape[1]).tril().bool()
    if dtype is None:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def check_rows(moh, got: torch.Tensor, ids: torch.Tensor, places: list[slice]) -> None:
    """Logits of each row's tokens are those of the naive loop on the row alone."""
    weights = {name: tensor.double().cpu().numpy() for name, tensor in moh.state_dict().items()}
    for row, place in enumerate(places[:3]):
        expected = naive.logits(moh.config, weights, ids[row, : LENGTHS[row]].numpy())
        np.testing.assert_allclose(got[row, place].cpu().numpy(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("implementation", "fields"),
    [
        *(("sdpa", {"num_key_value_heads": 1}), ("sdpa", {"num_key_value_heads": 4, "head_fallback": "none"})),
        *(("sdpa", {}), ("eager", {}), ("sdpa", LOCAL), ("eager", LOCAL), ("sdpa", START), ("eager", START)),
    ],
    ids=str,
)
def test_padded_rows_are_the_rows_alone(make_pair, ids, implementation, fields):
    # Eager attention has its softmax in float32, where float64's masks overflow; LLaMA gives NaN there, too.
    dtype = torch.float64 if implementation == "sdpa" else torch.float32
    _, moh = make_pair(attn_implementation=implementation, dtype=dtype, **PLAN | fields)
    embed = moh.get_input_embeddings()
    with torch.no_grad():
        for side in ("left", "right"):
            padded, mask, places = padded_rows(ids, side)
            counted = (mask.cumsum(1) - 1).clamp_min(0)
            calls = {
                "mask": {"attention_mask": mask},
                "positions": {"attention_mask": mask, "position_ids": counted},
                "shifted": {"attention_mask": mask, "position_ids": counted + 9, "use_cache": False},
            }
            whole = four_dims(mask, None if implementation == "sdpa" else dtype)
            calls["4 dims"] = {"attention_mask": whole, "use_cache": False}
            calls["embeds"] = {"attention_mask": mask.bool(), "inputs_embeds": embed(padded), "input_ids": None}
            for arguments in calls.values():
                check_rows(moh, moh(**{"input_ids": padded} | arguments).logits, ids, places)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_documents_are_the_documents_alone_wherever_their_positions_begin(make_pair, plan, ids, implementation):
    _, moh = make_pair(attn_implementation=implementation, dtype=torch.float64, **plan)
    packed = torch.cat([ids[row, :length] for row, length in enumerate(LENGTHS[:3])])[None]
    for starts in ([0, 0, 0], [3, 50, 7]):
        positions = torch.cat([torch.arange(s, s + length) for s, length in zip(starts, LENGTHS, strict=False)])[None]
        with torch.no_grad():
            got = moh(packed, position_ids=positions, use_cache=False).logits[0]
        check_rows(moh, torch.stack([got, got, got]), ids, [slice(0, 24), slice(24, 41), slice(41, 42)])


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_padded_rows_in_chunks_over_a_cache(make_pair, plan, ids, cache):
    _, moh = make_pair(dtype=torch.float64, **plan)
    padded, mask, places = padded_rows(ids, "left")
    past = DynamicCache(config=moh.config) if cache is DynamicCache else StaticCache(moh.config, max_cache_len=30)
    got, done = [], 0
    with torch.no_grad():
        # Row 1 begins in the first chunk, row 2 with the last single token.
        for count in (10, 12, 1, 1):
            done += count
            output = moh(padded[:, done - count : done], attention_mask=mask[:, :done], past_key_values=past)
            got.append(output.logits)
    check_rows(moh, torch.cat(got, 1), ids, places)


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"use_cache": False}, {"prefill_chunk_size": 5}, {"num_beams": 2}),
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=str,
)
def test_generation_of_padded_rows(make_pair, plan, ids, settings):
    _, moh = make_pair(**plan)
    common = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    padded, mask, places = padded_rows(ids, "left")
    together = moh.generate(padded[:3], attention_mask=mask[:3], **common, **settings)[:, -6:]
    settings = {} if "cache_implementation" in settings else settings
    for row, place in enumerate(places[:3]):
        assert torch.equal(together[row], moh.generate(padded[row : row + 1, place], **common, **settings)[0, -6:])


@pytest.mark.slow
def test_compiled_and_exported_models_know_padding(make_pair, ids):
    _, moh = make_pair(num_hidden_layers=1, **PLAN)
    padded, mask, places = padded_rows(ids, "left")
    arguments = {"attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        compiled = torch.compile(moh, fullgraph=True, backend="aot_eager")
        check_rows(moh, compiled(padded, **arguments).logits, ids, places)
        exported = torch.export.export(moh, (padded,), arguments, strict=False).module()
        check_rows(moh, exported(padded, **arguments).logits, ids, places)


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


def test_a_paged_cache_has_the_keys_of_all_requests_side_by_side():
    """A chunk of one request, a step of another one, and the first token of a third; then padding."""
    positions = torch.tensor([[4, 5, 9, 0, 0, 0]])
    seen = paged_keys(positions, torch.tensor([0, 2, 3, 4]), torch.tensor([0, 6, 16, 17]), 3, 1)
    assert seen.start[0, :4, 0].tolist() == [0, 0, 6, 16]
    assert seen.last[0, :4, 0].tolist() == [4, 5, 15, 16]
    assert seen.near[0, :4, 0].tolist() == [2, 3, 13, 16]
    assert seen.hidden[0, :3, 0].tolist() == [1, 2, 6] and seen.hidden[0, 3, 0] <= 0
    assert not seen.is_consecutive and not seen.is_causal


def test_nothing_waits_for_the_device():
    """Reading a value of a fake tensor, as of a GPU's, raises."""
    draw = random.Random(1)
    for _ in range(50):
        case = drawn_case(draw)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            inputs, mask, positions = (
                None if tensor is None else fake.from_tensor(tensor)
                for tensor in (case["inputs"], case["mask"], case["positions"])
            )
            for implementation in ("sdpa", "flash_attention_2", "an engine's"):
                seen_keys(inputs, mask, positions, case["past"], False, implementation, 3, 1, 5)
