"""Every mask that LLaMA takes: with all heads on LLaMA's result, else the naive loop's over keys that are visible."""

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, StaticCache

from moh_llm.modeling import interval_attention_moh
from tests.modeling import naive

LENGTH = 24
LOCAL = {"head_fallback": "local", "local_window": 4, "local_sinks": 2}
PLANS = {
    "paper": {"router_type": "query_norm"},
    "weighted": {"router_type": "two_stage", "router_score": "weighted"},
    "value": {"router_type": "linear", "head_fallback": "value"},
    "local": {"router_type": "linear", **LOCAL},
    "no sinks": {"router_type": "query_norm", **LOCAL, "local_sinks": 0},
    "start": {"router_type": "threshold", **LOCAL, "local_start": 9, "never_on_heads": [[3], [1, 2]]},
    "fixed groups": {"router_type": "none", "routing_granularity": "kv_group", **LOCAL, "local_start": 8}
    | {"shared_heads": [[0, 1], []], "num_shared_heads": [2, 0], "num_active_heads": [2, 0]},
}
ROWS = {  # where tokens are
    "all": [(0, 24)],
    "left": [(9, 24)],
    "right": [(0, 15)],
    "both": [(3, 17)],
    "second turn": [(0, 8), (13, 24)],
    "left, then a hole": [(2, 12), (19, 24)],
    "holes": [(0, 1), (2, 3), (6, 14), (15, 16), (18, 23)],
    "a late token": [(0, 2), (23, 24)],
    "none": [],
}


def padding() -> torch.Tensor:
    """Masks of `ROWS`, `[B, T]`."""
    mask = torch.zeros(len(ROWS), LENGTH, dtype=torch.int64)
    for row, places in zip(mask, ROWS.values(), strict=True):
        for first, last in places:
            row[first:last] = 1
    return mask


def counted(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


def causal(mask: torch.Tensor) -> torch.Tensor:
    """Which keys queries see, `[B, T, T]`."""
    return mask.bool()[:, None] & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()


@pytest.fixture
def make(make_pair) -> Callable:
    def make(name: str, **fields):
        return make_pair(**{"num_shared_heads": 1, "num_active_heads": 2} | PLANS[name] | fields)

    return make


def some_ids() -> torch.Tensor:
    return torch.randint(1, 257, (len(ROWS), LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def ids() -> torch.Tensor:
    return some_ids()


def loop(moh, ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, bias=None) -> torch.Tensor:
    """The naive loop's logits; NaN of queries that see nothing. `visible` and `bias` are `[B, ..., T, T]`."""
    weights, found = {name: tensor.double().numpy() for name, tensor in moh.state_dict().items()}, []
    for row in range(len(ids)):
        how = {"visible": visible[row].numpy(), "bias": None if bias is None else bias[row].double().numpy()}
        logits = naive.logits(moh.config, weights, ids[row].numpy(), positions=positions[row].tolist(), **how)
        sees = visible[row].reshape(-1, *visible.shape[-2:]).any(-1).all(0)
        found.append(torch.from_numpy(logits).masked_fill(~sees[:, None], torch.nan))
    return torch.stack(found)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.isfinite().all()
    found = found.detach().double().masked_fill(expected.isnan(), torch.nan)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4, equal_nan=True)


def in_chunks(moh, ids, mask, counts, cache) -> torch.Tensor:
    """Logits over a cache, with positions that count visible tokens."""
    found, done, positions = [], 0, counted(mask)
    for count in counts:
        part, done = slice(done, done + count), done + count
        given = {"attention_mask": mask[:, :done], "position_ids": positions[:, part], "past_key_values": cache}
        found.append(moh(ids[:, part], **given).logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", PLANS)
def test_padding_wherever_it_is_is_not_there(make, ids, name, monkeypatch):
    _, moh = make(name, dtype=torch.float64)
    mask, positions = padding(), counted(padding())
    expected = loop(moh, ids, positions, causal(mask))
    for row, shown in enumerate(mask.bool()):  # of the loop: it is that of the text without the holes
        if name in ("value", "start") and shown.any():
            alone = loop(moh, ids[row, shown][None], positions[row, shown][None], causal(mask[row, shown][None]))
            torch.testing.assert_close(expected[row, shown], alone[0])
    expected = expected.masked_fill(mask[..., None] == 0, torch.nan)  # what padding gives nobody reads
    given = {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        check(moh(ids, **given).logits, expected)
        for kind in (mask.bool(), mask.float(), mask * 3):
            check(moh(ids, **given | {"attention_mask": kind}, use_cache=False).logits, expected)
        for row in range(len(ids)):
            alone = {name: tensor[row : row + 1] for name, tensor in given.items()}
            check(moh(ids[row : row + 1], **alone).logits, expected[row : row + 1])
        for counts in ([10, 12, 1, 1], [1] * LENGTH):
            for cache in (DynamicCache(config=moh.config), StaticCache(moh.config, max_cache_len=30)):
                check(in_chunks(moh, ids, mask, counts, cache), expected)
    check(moh(ids, **given).logits, expected)  # with gradients
    for name in ("_ROWS", "_BLOCK"):  # queries in several blocks
        monkeypatch.setattr(interval_attention_moh, name, 8)
    with torch.no_grad():
        check(moh(ids, **given).logits, expected)
        check(in_chunks(moh, ids, mask, [10, 12, 1, 1], DynamicCache(config=moh.config)), expected)
    monkeypatch.undo()
    moh.float().set_attn_implementation("eager")  # whose masks overflow in float64; LLaMA gives NaN there, too
    with torch.no_grad():
        check(moh(ids, **given).logits, expected)
        check(in_chunks(moh, ids, mask, [10, 12, 1, 1], StaticCache(moh.config, max_cache_len=30)), expected)


def four_dims(kind: str, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Which keys queries see, `[B, 1 or H, T, T]`, and what is added to their scores."""
    generator = torch.Generator().manual_seed(1)
    seen = causal(padding())[:, None]
    square = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if kind == "prefix":  # the first tokens see each other
        prefix = square.tril().clone()
        prefix[:10, :10] = True
        return prefix.expand_as(seen), None
    if kind == "all see all":
        return padding().bool()[:, None, None].expand(-1, -1, LENGTH, -1), None
    if kind == "random":
        shown = torch.rand(len(ROWS), 1, LENGTH, LENGTH, generator=generator) < 0.6
        return (shown | torch.eye(LENGTH, dtype=torch.bool)) & square.tril(), None
    if kind == "heads":
        shown = torch.rand(len(ROWS), heads, LENGTH, LENGTH, generator=generator) < 0.7
        return (shown | torch.eye(LENGTH, dtype=torch.bool)) & square.tril(), None
    if kind == "distances":
        steps = torch.arange(LENGTH)
        slopes = torch.tensor([0.5, 0.25, 0.1, 0.01])[:heads, None, None]
        return seen, (slopes * (steps - steps[:, None])).expand(len(ROWS), -1, -1, -1)
    return seen, None  # padding


FOUR_DIMS = ["padding", "prefix", "all see all", "random", "heads", "distances"]


@pytest.mark.parametrize("kind", FOUR_DIMS)
@pytest.mark.parametrize("name", ["paper", "value", "local", "start", "fixed groups"])
def test_masks_of_ones_own(make, ids, name, kind):
    _, moh = make(name, dtype=torch.float64)
    rows = [1, 4, 6]
    seen, bias = (None if tensor is None else tensor[rows] for tensor in four_dims(kind, 4))
    ids = ids[rows]
    positions = torch.arange(LENGTH).expand(len(rows), -1)
    expected = loop(moh, ids, positions, seen, bias)
    added = torch.zeros(seen.shape, dtype=torch.float64) if bias is None else bias.double()
    masks = [seen] if bias is None else []
    masks += [added.masked_fill(~seen, value) for value in (-torch.inf, torch.finfo(torch.float32).min, -1e9)]
    with torch.no_grad():
        for mask in masks:
            check(moh(ids, attention_mask=mask, use_cache=False).logits, expected)
            for cache in (DynamicCache(config=moh.config),):
                found, done = [], 0
                for count in (LENGTH,) if kind in ("prefix", "all see all") else (10, 12, 1, 1):
                    part, done = slice(done, done + count), done + count
                    given = {"attention_mask": mask[:, :, part, :done], "past_key_values": cache}
                    found.append(moh(ids[:, part], **given).logits)
                check(torch.cat(found, dim=1), expected)
    check(moh(ids, attention_mask=masks[0], use_cache=False).logits, expected)  # with gradients
    moh.float().set_attn_implementation("eager")
    with torch.no_grad():
        check(moh(ids, attention_mask=masks[-1].float(), use_cache=False).logits, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", PLANS)
def test_with_all_heads_on_every_mask_is_the_bases(make, ids, name, implementation):
    if name == "weighted":
        pytest.skip("its gates are not 1")
    dense, moh = make(name, attn_implementation=implementation)
    masks = [padding(), padding().bool(), padding().float()]
    for kind in FOUR_DIMS:
        seen, bias = four_dims(kind, 4)
        bias = torch.zeros(seen.shape) if bias is None else bias
        masks += [bias.masked_fill(~seen, -1e9), *([seen] if implementation == "sdpa" else [])]
    with torch.no_grad(), moh.all_heads_active():
        for mask in masks:
            for given in ({}, {"position_ids": counted(padding())}):
                given |= {"attention_mask": mask, "use_cache": False}
                torch.testing.assert_close(
                    moh(ids, **given).logits, dense(ids, **given).logits, rtol=0, atol=0, equal_nan=True
                )
        mask = padding()
        found, expected = (
            in_chunks(model, ids, mask, [10, 12, 1, 1], DynamicCache(config=model.config)) for model in (moh, dense)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["paper", "value", "local", "start", "fixed groups"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 2},
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=str,
)
def test_generation_after_turns_of_different_lengths(make, ids, name, settings):
    _, moh = make(name)
    common = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    rows = [0, 1, 4, 5, 7]
    mask, ids = padding()[rows], ids[rows]
    together = moh.generate(ids, attention_mask=mask, **common, **settings)[:, -6:]
    settings = {key: value for key, value in settings.items() if key == "num_beams"}
    for row, shown in enumerate(mask.bool()):
        alone = moh.generate(ids[row, shown][None], **common, **settings)[0, -6:]
        assert torch.equal(together[row], alone)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["paper", "value", "local", "start", "fixed groups"])
def test_gradients_are_those_of_the_text_without_holes(make, ids, name, checkpointing):
    _, moh = make(name, dtype=torch.float64)
    moh.train()
    if checkpointing:
        moh.gradient_checkpointing_enable()
    rows = [1, 4, 6]
    mask, ids, positions = padding()[rows].bool(), ids[rows], counted(padding())[rows]

    def gradients(*passes: tuple[torch.Tensor, torch.Tensor | slice, dict]) -> dict[str, torch.Tensor]:
        moh.zero_grad()
        for given, counts, more in passes:
            logits = moh(given, use_cache=False, output_router_logits=False, **more).logits
            logits[counts].square().sum().backward()
        return {name: weight.grad.clone() for name, weight in moh.named_parameters() if weight.grad is not None}

    expected = gradients(*((row[shown][None], slice(None), {}) for row, shown in zip(ids, mask, strict=True)))
    for given in (mask, causal(mask)[:, None]):
        found = gradients((ids, mask, {"attention_mask": given, "position_ids": positions}))
        torch.testing.assert_close(found, expected)
