"""Local attention over an engine's paged cache, imitated: what vLLM's plugin does, without vLLM."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.analysis.heads import heads_on
from moh_llm.serving.paged import EngineCache, PagedLayout, near_keys, take

BLOCKS, TOKENS = 24, 4  # of the cache


def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As vLLM's CPU kernels have it: of a block and a key-value head the keys `[D, N]`, then the values `[N, D]`."""
    groups, size = keys.shape[1:]
    halves = cache.view(len(cache), groups, 2, -1)
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        block, token = divmod(slot, TOKENS)
        halves[block, :, 0].view(groups, size, TOKENS)[:, :, token] = key
        halves[block, :, 1].view(groups, TOKENS, size)[:, token] = value


class Engine:
    """Requests whose tokens lie in blocks that are not in order, and attention that keeps keys and values itself."""

    def __init__(self, model, num_requests: int):
        self.config = model.config
        groups, size = self.config.num_key_value_heads, self.config.head_dim
        shape = (BLOCKS * num_requests, groups, TOKENS, 2 * size)
        self.caches = [torch.full(shape, torch.nan) for _ in range(self.config.num_hidden_layers)]
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))
        self.table, self.lengths = order.view(num_requests, BLOCKS), [0] * num_requests
        self.layout = PagedLayout(self.caches[0], size, write)

    def offsets(self, of_request: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        blocks = self.table[of_request, positions // TOKENS]
        return self.layout.offsets(self.caches[0], blocks, positions)

    def step(self, counts: list[int]) -> dict:
        """Arguments of a step that adds so many tokens to each request; there is one more token, which is padding."""
        self.lengths = [before + count for before, count in zip(self.lengths, counts, strict=True)]
        self.edges = [0, *torch.tensor(counts).cumsum(0).tolist()]
        plan = self.config.local_window, self.config.local_sinks, self.config.local_start
        given = torch.tensor(self.edges), torch.tensor(self.lengths)
        seen, *keys = near_keys(*given, *plan, total=self.edges[-1] + 1)
        offsets = self.offsets(*keys)
        return {"seen": seen, "cache": EngineCache(lambda module: take(self.caches[module.layer_idx], offsets))}

    def attention(self, module, query, key, value, attention_mask, scaling, **kwargs):
        """Full attention of the new tokens, flattened as engines do it."""
        cache, outputs = self.caches[module.layer_idx], []
        for request, (first, last) in enumerate(zip(self.edges[:-1], self.edges[1:], strict=True)):
            places = torch.arange(self.lengths[request])
            own = places[len(places) - (last - first) :]
            slots = self.table[request, own // TOKENS] * TOKENS + own % TOKENS
            write(*(states[0, :, first:last].transpose(0, 1) for states in (key, value)), cache, slots)
            keys, values = take(cache, self.offsets(torch.full_like(places, request), places))
            mask = places[None] <= own[:, None]
            out = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, first:last], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1).flatten(1))
        outputs.append(query.new_zeros(1, outputs[0].shape[1]))
        return torch.cat(outputs), None


PLAN = {"head_fallback": "local", "local_window": 5, "local_sinks": 3}
PLANS = [
    {"router_type": "threshold", "num_shared_heads": 1, "num_active_heads": 2, "local_start": 0},
    {"router_type": "linear", "num_shared_heads": 1, "num_active_heads": 2, "local_start": 14},
    {
        "router_type": "threshold",
        "num_shared_heads": 0,
        "num_active_heads": 2,
        "local_start": 14,
        "routing_granularity": "kv_group",
    },
    {"router_type": "threshold", "num_shared_heads": 1, "num_active_heads": 2, "never_on_heads": [[1], [2, 3]]},
    {"router_type": "none", "shared_heads": [[0, 1], [2, 3]], "num_shared_heads": 2, "num_active_heads": 2},
]
# Prompts in chunks, then steps of single tokens, one request by itself, and one that ends.
SCHEDULE = [[9, 0, 4], [8, 20, 1], [1, 1, 1], [1, 12, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 12], [1, 1, 1]]


@pytest.mark.parametrize("plan", PLANS)
def test_requests_in_chunks_give_what_each_gives_alone(make_pair, plan, monkeypatch):
    _, model = make_pair(**PLAN, **plan)
    assert heads_on(model, torch.arange(1, 30)[None])[:, :, 20:].float().mean() < 1
    prompts = torch.randint(1, 257, (3, 60), generator=torch.Generator().manual_seed(1))
    expected = model.model(prompts).last_hidden_state
    engine = Engine(model, len(prompts))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "engine", engine.attention)
    model.set_attn_implementation("engine")
    with torch.no_grad():
        for counts in SCHEDULE:
            before = list(engine.lengths)
            step = engine.step(counts)
            places = [torch.arange(first, last) for first, last in zip(before, engine.lengths, strict=True)]
            tokens = [prompts[request, own] for request, own in enumerate(places)]
            positions = torch.cat([*places, torch.zeros(1, dtype=torch.int64)])[None]
            ids = torch.cat([*tokens, torch.ones(1, dtype=torch.int64)])[None]
            hidden = model.model(ids, position_ids=positions, use_cache=False, **step).last_hidden_state[0]
            for request, part in enumerate(hidden[:-1].split(counts)):
                torch.testing.assert_close(part, expected[request, places[request]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_of_a_cache_is_found(dtype):
    """With blocks that lie apart, as where the layers' blocks alternate."""
    groups, size = 3, 40
    memory = torch.full((5, 2, 2 * groups * TOKENS * size), torch.nan, dtype=dtype)
    cache = memory[:, 1].unflatten(1, (groups, TOKENS, 2 * size))
    layout = PagedLayout(cache, size, write)
    keys, values = torch.randn(2, 6, groups, size).to(dtype)
    slots = torch.tensor([4 * TOKENS + 3, TOKENS, 7, 0, 9, 12])
    write(keys, values, cache, slots)
    found = take(cache, layout.offsets(cache, slots // TOKENS, slots % TOKENS))
    for states, expected in zip(found, (keys, values), strict=True):
        assert torch.equal(states[0].transpose(0, 1), expected)


def test_a_cache_that_rounds_is_refused():
    def rounded(keys, values, cache, slots):
        write((keys / 2).round() * 2, values, cache, slots)

    fault = "keeps keys and values as they are; leave out --kv-cache-dtype"
    for cache in (torch.zeros(2, 2, TOKENS, 16), torch.zeros(2, 2, TOKENS, 16, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=fault):
            PagedLayout(cache, 8, rounded)
