"""The cache that drops what is not read gives what a dynamic cache gives, and is smaller."""

import contextlib

import pytest
import torch

from moh_llm import MoHCache
from moh_llm.attention import cache as cache_module

WINDOW, SINKS = 8, 3
GROUPS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
LOCAL = {"head_fallback": "local", "local_window": WINDOW, "local_sinks": SINKS}
PLANS = {
    "fixed groups": {"shared_heads": [[2, 3], []], "router_type": "none", "routing_granularity": "kv_group"}
    | {"num_shared_heads": [2, 0], "num_active_heads": [2, 0]},
    "fixed heads": {"shared_heads": [[1, 3], [0, 5]], "router_type": "none"}
    | {"num_shared_heads": 2, "num_active_heads": 2},
    "routed": {"shared_heads": [[1], [4]], "never_on_heads": [[2, 3], [0, 1, 2]], "router_type": "threshold"}
    | {"num_shared_heads": 1, "num_active_heads": 2},
    "start": {"shared_heads": [[2, 3], []], "router_type": "none", "routing_granularity": "kv_group"}
    | {"num_shared_heads": [2, 0], "num_active_heads": [2, 0], "local_start": 16},
    "no sinks": {"shared_heads": [[2, 3], []], "router_type": "none", "routing_granularity": "kv_group"}
    | {"num_shared_heads": [2, 0], "num_active_heads": [2, 0], "local_sinks": 0},
    "all may be on": {"router_type": "linear", "num_shared_heads": 1, "num_active_heads": 2},
}


@pytest.fixture(autouse=True)
def drop_soon(monkeypatch) -> None:
    monkeypatch.setattr(cache_module, "_MORE", 4)
    monkeypatch.setattr(cache_module, "_STEPS", 5)


@pytest.fixture
def make(make_pair):
    return lambda name: make_pair(dtype=torch.float64, **GROUPS, **(LOCAL | PLANS[name]))[1]


def draw(rows: int, length: int) -> torch.Tensor:
    return torch.randint(1, 257, (rows, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("chunks", [[40, 1, 1], [5, 4, 1, 1, 1, 20, 10], [1] * 42])
def test_logits_are_those_of_one_pass(make, name, chunks) -> None:
    moh = make(name)
    ids, mask = draw(3, sum(chunks)), torch.ones(3, sum(chunks), dtype=torch.long)
    mask[1, :4], mask[2, :17] = 0, 0  # padding on the left
    for given in ({}, {"attention_mask": mask}):
        expected = moh(ids, **given).logits
        cache, found, end = MoHCache(moh.config), [], 0
        for chunk in chunks:
            end += chunk
            so_far = {"attention_mask": mask[:, :end]} if given else {}
            found.append(moh(ids[:, end - chunk : end], past_key_values=cache, **so_far).logits)
            assert cache.get_seq_length() == end
        seen = mask.bool() if given else slice(None)
        torch.testing.assert_close(torch.cat(found, dim=1)[seen], expected[seen])


@torch.no_grad()
def test_nothing_is_dropped_while_a_row_has_all_heads_on(make) -> None:
    moh = make("start")
    cache, mask = MoHCache(moh.config), torch.ones(2, 50, dtype=torch.long)
    mask[1, :30] = 0  # this row has all heads on up to the 46th token
    for end in (45, 46):
        moh(draw(2, end)[:, cache.get_seq_length() :], attention_mask=mask[:, :end], past_key_values=cache)
        assert [layer.begin > 0 for layer in cache.layers] == [end == 46] * 2
    with pytest.raises(ValueError, match="cannot remove 1 tokens from the cache"):
        cache.crop(-1)


def in_chunks(moh, ids: torch.Tensor, mask: torch.Tensor, chunks: list[int], cache) -> torch.Tensor:
    found, end = [], cache.get_seq_length()
    for chunk in chunks:
        end += chunk
        found.append(moh(ids[:, end - chunk : end], attention_mask=mask[:, :end], past_key_values=cache).logits)
    return torch.cat(found, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("chunks", [[60, *[1] * 30], [30, 1, 1, 28, 30]])
def test_padding_between_tokens(make, name, chunks) -> None:
    """Turns of rows that are padded on the right, then more turns; a row that begins late; one of one token."""
    moh, ids, mask = make(name), draw(4, 90), torch.ones(4, 90, dtype=torch.long)
    mask[0, 20:50], mask[0, 70:80], mask[1, 3:60], mask[2, :75], mask[3, :29], mask[3, 30:89] = 0, 0, 0, 0, 0, 0
    expected = moh(ids, attention_mask=mask).logits
    cache = MoHCache(moh.config)
    found = in_chunks(moh, ids, mask, chunks, cache)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
    assert all(layer.begin == 0 for layer in cache.layers)


@torch.no_grad()
def test_a_prompt_leaves_no_memory_of_what_it_dropped(make) -> None:
    moh = make("fixed groups")
    cache = MoHCache(moh.config)
    moh(draw(1, 100), past_key_values=cache)
    kept = [states for layer in cache.layers for room in layer._rooms for states in room.states]
    assert sum(states.numel() for states in kept) < 2 * 2 * 100 * 3 * 8 / 2
    assert all(states.untyped_storage().nbytes() == states.nbytes for states in kept)


@torch.no_grad()
@pytest.mark.parametrize("name", PLANS)
def test_any_mask_of_four_dims(make, name) -> None:
    moh, ids = make(name), draw(2, 40)
    mask = torch.rand(2, 1, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.6
    mask = mask.tril() | torch.eye(40, dtype=torch.bool)
    cache, found = MoHCache(moh.config), []
    for part in (slice(0, 30), slice(30, 31), slice(31, 32), slice(32, 40)):
        found.append(moh(ids[:, part], attention_mask=mask[:, :, part, : part.stop], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), moh(ids, attention_mask=mask).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", PLANS)
def test_rows_that_change_places(make, name) -> None:
    """As in a search with beams, before and after tokens were dropped."""
    moh, ids, mask = make(name), draw(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :6] = 0
    cache, order = MoHCache(moh.config), torch.tensor([1, 0, 1, 1])
    in_chunks(moh, ids, mask, [40, 5], cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 2, 2]))
    found = in_chunks(moh, ids[order], mask[order], [1] * 15, cache)
    expected = moh(ids, attention_mask=mask).logits[order, 45:]
    torch.testing.assert_close(found, expected)
    cache.batch_select_indices(torch.tensor([1, 2]))
    assert [layer.keys.shape[0] for layer in cache.layers] == [2, 2]


@torch.no_grad()
@pytest.mark.parametrize("change", ["the first tokens", "no mask", "tokens of the window", "four dims"])
def test_another_mask_than_before_that_shows_what_was_dropped_is_refused(make, change) -> None:
    moh, ids, mask = make("fixed groups"), draw(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :2] = 0
    cache = MoHCache(moh.config)
    in_chunks(moh, ids, mask, [50], cache)
    now = mask[:, :51].clone()
    if change == "the first tokens":
        now[1, 0] = 1
    if change == "tokens of the window":
        now[:, 36:50] = 0
    masks = {"no mask": None, "four dims": torch.rand(2, 1, 2, 52) < 0.5}
    with pytest.raises(ValueError, match=r"attention_mask shows tokens .* dropped; use a DynamicCache"):
        moh(
            ids[:, 50:52] if change == "four dims" else ids[:, 50:51],
            attention_mask=masks.get(change, now),
            past_key_values=cache,
        )


@torch.no_grad()
def test_it_keeps_sinks_and_windows_of_groups_that_are_never_on(make) -> None:
    moh, length = make("fixed groups"), 200
    cache = MoHCache(moh.config)
    moh(draw(2, length), past_key_values=cache)
    for layer, kept in zip(cache.layers, ([1], []), strict=True):
        assert layer.keys.shape == layer.values.shape == (2, len(kept), length, 8)
        near = layer._rooms[-1].states
        assert [tensor.shape[1:3] for tensor in near] == [(3 - len(kept), SINKS + WINDOW - 1 + 4)] * 2


@torch.no_grad()
@pytest.mark.parametrize("name", PLANS)
def test_the_last_tokens_can_be_removed(make, name) -> None:
    moh, ids = make(name), draw(2, 60)
    cache = MoHCache(moh.config)
    moh(ids[:, :50], past_key_values=cache)
    cache.crop(-3)
    found = moh(ids[:, 47:], past_key_values=cache).logits
    torch.testing.assert_close(found, moh(ids).logits[:, 47:])
    if cache.layers[0].local_groups:
        with pytest.raises(ValueError, match=r"cannot remove 40 tokens from the cache.*use a DynamicCache"):
            cache.crop(-40)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(moh(ids, past_key_values=cache).logits, moh(ids).logits)


def test_a_model_without_local_fallbacks_takes_it(make_pair) -> None:
    _, moh = make_pair(num_shared_heads=1, num_active_heads=2)
    found = moh(draw(1, 30), past_key_values=MoHCache(moh.config)).logits
    torch.testing.assert_close(found, moh(draw(1, 30)).logits)


@torch.no_grad()
@pytest.mark.parametrize("how", ["all heads on", "eager"])
def test_where_all_keys_are_read_all_are_kept(make, how) -> None:
    moh, ids = make("fixed groups").float(), draw(2, 60)
    if how == "eager":
        moh.set_attn_implementation("eager")
    cache, all_on = MoHCache(moh.config), how == "all heads on"
    with moh.all_heads_active() if all_on else contextlib.nullcontext():
        expected = moh(ids).logits
        found = in_chunks(moh, ids, torch.ones_like(ids), [50, 1, 9], cache)
    torch.testing.assert_close(found, expected)
    if all_on:
        moh(draw(2, 10), past_key_values=cache)  # which drops them
        with moh.all_heads_active(), pytest.raises(ValueError, match="use a DynamicCache"):
            moh(draw(2, 1), past_key_values=cache)
