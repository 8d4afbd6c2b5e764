"""Calibration text that repeats parts of itself: what is repeated, where, and that fits of local fallbacks see it."""

import torch
from transformers import AutoConfig, LlamaForCausalLM

from moh_llm.conversion.calibrate import layer_samples
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.plan import PlanOptions
from moh_llm.data.windows import REPEAT_EVERY, REPEATED, repeat_spans
from moh_llm.records.model import read_weight_map

DOCUMENTS = (3100, 996, 4096)  # tokens: two documents in the first row, one in the second


def make_batch() -> dict[str, torch.Tensor]:
    """Two rows of 4,096 tokens, no token of a document like another one."""
    parts = [torch.arange(length) for length in DOCUMENTS]
    ids = [1 + part + 5000 * number for number, part in enumerate(parts)]
    return {"input_ids": torch.cat(ids).view(2, 4096), "position_ids": torch.cat(parts).view(2, 4096)}


def test_spans_come_back_in_the_second_half_of_their_document():
    batch, untouched = make_batch(), make_batch()
    (found,) = repeat_spans([batch])
    assert torch.equal(batch["input_ids"], untouched["input_ids"])
    assert torch.equal(found["position_ids"], untouched["position_ids"])
    before, after = (b["input_ids"].flatten().split(DOCUMENTS) for b in (batch, found))
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = (old != new).nonzero()[:, 0]
        if number == 1:
            assert not len(changed)
            continue
        spans = len(old) // REPEAT_EVERY
        distances = (old - new)[changed]  # tokens count up, so that this is how far back they were read
        assert changed.min() >= len(old) // 2 - spans and (changed - distances < len(old) // 2).all()
        repeated = [int((distances == distance).sum()) for distance in distances.unique()]
        assert len(repeated) == spans and min(repeated) >= REPEATED[0] and max(repeated) <= REPEATED[1]
        assert (changed - distances).max() > len(old) // 4  # they are of all parts of the first half


def test_seeds_draw_other_places():
    first, again, other = (repeat_spans([make_batch()], seed)[0]["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_fits_of_local_fallbacks_see_the_repetitions(make_llama, tmp_path):
    """A layer of value fallbacks sees the text as it is."""
    folder = make_llama(num_hidden_layers=1, max_position_embeddings=2048)
    weight_map, config = read_weight_map(folder)[1], AutoConfig.from_pretrained(folder)
    base = LayerwiseModel(folder, weight_map, config, torch.float32, torch.device("cpu"))
    model = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.randint(1, 257, (2, 2048), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(2048).repeat(2, 1)}
    for fallback, (read,) in (("local", repeat_spans([batch])), ("value", [batch])):
        plan = PlanOptions(fallback=fallback, keys=0.5, context=2048)
        (sample,) = layer_samples(base, [batch], plan, tmp_path)
        skipped = plan.all_heads_until if fallback == "local" else 1
        kept, held_out = (batch["position_ids"] >= skipped).flatten(), torch.arange(4096) >= 3072
        order = torch.cat([(kept & ~held_out).nonzero()[:, 0], (kept & held_out).nonzero()[:, 0]])
        expected = model.model.layers[0].input_layernorm(model.model.embed_tokens(read["input_ids"]))
        torch.testing.assert_close(sample.inputs, expected.detach().flatten(0, 1)[order])
