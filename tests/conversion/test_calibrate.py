"""The two sweeps over layers on disk against hooks and autograd on the whole model."""

import pytest
import torch
from tqdm import tqdm
from transformers import AutoConfig, LlamaForCausalLM

from moh_llm.conversion import calibrate as module
from moh_llm.conversion.calibrate import calibrate
from moh_llm.conversion.fit import LayerFitter
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.plan import PlanOptions
from moh_llm.records.model import read_weight_map

PLAN = PlanOptions(fallback="value", num_shared_heads=1, shared="importance")
LENGTH = 96


def make_batches(*rows):
    """Batches of so many windows, in each of which a second document starts somewhere."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for count in rows:
        positions = torch.arange(LENGTH).repeat(count, 1)
        for row in range(count):
            positions[row, 20 + row :] -= 20 + row
        ids = torch.randint(1, 257, (count, LENGTH), generator=generator)
        batches.append({"input_ids": ids, "position_ids": positions})
    return batches


@pytest.fixture
def run(make_llama, tmp_path, monkeypatch):
    """Calibrate a tiny LLaMA: its folder, the function, and the samples that its layers were fitted on."""
    folder = make_llama(num_attention_heads=4, num_key_value_heads=2)
    samples = []

    class Recorder(LayerFitter):
        def __init__(self, sample, *args):
            samples.append(sample)
            super().__init__(sample, *args)

    def run(batches, plan=PLAN, seed=0):
        samples.clear()
        weight_map, config = read_weight_map(folder)[1], AutoConfig.from_pretrained(folder)
        base = LayerwiseModel(folder, weight_map, config, torch.float32, torch.device("cpu"))
        found = calibrate(base, batches, plan, tmp_path, seed)
        assert list(tmp_path.iterdir()) == []
        return found

    monkeypatch.setattr(module, "LayerFitter", Recorder)
    return folder, run, samples


def observe(folder, batches, seed):
    """Per layer what passes through the attention, rows by token in the order of the text, by hooks and autograd."""
    model = LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    seen = [{"inputs": [], "heads": [], "values": [], "outputs": []} for _ in model.model.layers]
    for layer, rows in zip(model.model.layers, seen, strict=True):
        attention = layer.self_attn
        attention.q_proj.register_forward_hook(lambda m, args, out, rows=rows: rows["inputs"].append(args[0]))
        attention.v_proj.register_forward_hook(lambda m, args, out, rows=rows: rows["values"].append(out))
        attention.o_proj.register_forward_hook(lambda m, args, out, rows=rows: rows["heads"].append(args[0]))
        attention.o_proj.register_forward_hook(lambda m, args, out, rows=rows: rows["outputs"].append(out))
    gradients = [[] for _ in seen]
    for batch in batches:
        embeddings = model.model.embed_tokens(batch["input_ids"]).requires_grad_(True)
        logits = model(inputs_embeds=embeddings, position_ids=batch["position_ids"], use_cache=False).logits
        logits = logits.flatten(0, 1)
        below = logits.detach().softmax(-1).cumsum(-1) < torch.rand(len(logits), 1, generator=generator)
        loss = -logits.log_softmax(-1).gather(1, below.sum(-1, keepdim=True)).sum()
        found = torch.autograd.grad(loss, [rows["outputs"][-1] for rows in seen])
        for rows, gradient in zip(gradients, found, strict=True):
            rows.append(gradient.flatten(0, 1))
    return [
        {name: torch.cat([t.detach().flatten(0, 1) for t in rows[name]]) for name in ("inputs", "heads", "values")}
        | {"gradients": torch.cat(own)}
        for rows, own in zip(seen, gradients, strict=True)
    ], model


@pytest.mark.parametrize(
    ("rows", "held_out", "seed"),
    [
        ((3, 4, 2), [*range(3 * LENGTH, 4 * LENGTH), *range(7 * LENGTH, 8 * LENGTH)], 0),
        ((1, 3), range(3 * LENGTH, 4 * LENGTH), 1),
        ((2, 1), range(3 * LENGTH - 3 * LENGTH // 4, 3 * LENGTH), 0),
    ],
    ids=["every fourth window", "four windows", "few windows: the last quarter"],
)
def test_samples_are_what_the_whole_model_shows(run, rows, held_out, seed):
    folder, calibrated, samples = run
    batches = make_batches(*rows)
    calibrated(batches, seed=seed)
    expected, model = observe(folder, batches, seed)
    total = sum(rows) * LENGTH
    positions = torch.cat([batch["position_ids"].flatten() for batch in batches])
    held_out = [token for token in held_out if positions[token] > 0]  # first tokens need no fit
    order = [token for token in range(total) if token not in held_out and positions[token] > 0] + held_out
    assert len(samples) == 2
    for sample, layer, own in zip(samples[::-1], expected, model.model.layers, strict=True):
        assert sample.fitted == len(order) - len(held_out) < total - len(held_out)
        torch.testing.assert_close(sample.inputs, layer["inputs"][order], rtol=1e-4, atol=1e-4)
        heads = layer["heads"][order].view(len(order), 4, 8)
        values = layer["values"][order].view(len(order), 2, 8)
        for head in range(4):
            torch.testing.assert_close(sample.heads[head], heads[:, head], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(sample.values[head], values[:, head // 2], rtol=1e-4, atol=1e-4)
        sensitivity = sum(torch.outer(g, g) for g in layer["gradients"].double()) / total
        torch.testing.assert_close(sample.sensitivity.double(), sensitivity, rtol=1e-4, atol=1e-4 * sensitivity.max())
        own_gradients = layer["gradients"][held_out]
        torch.testing.assert_close(sample.gradients, own_gradients, rtol=1e-4, atol=1e-4 * own_gradients.abs().max())
        assert torch.equal(sample.o_proj, own.self_attn.o_proj.weight)


def test_plan_is_followed(run):
    _, calibrated, _ = run
    for fits in calibrated(make_batches(4), PlanOptions(preset="paper", shared="importance")):
        assert len(fits[0].shared_heads) == 2 and fits[0].tensors == {} and fits.keys() == {0}
    groups = PlanOptions(fallback="value", num_shared_heads=2, shared="importance", routing_granularity="kv_group")
    for fits in calibrated(make_batches(4), groups):
        assert fits[2].shared_heads in ([0, 1], [2, 3]) and fits.keys() == {2}
        assert fits[2].tensors["router.routed.weight"].shape == (1, 32)
        assert fits[2].tensors["fallback.bias"].shape == (2, 8)


def test_the_bar_ends_with_the_last_layer(run, monkeypatch):
    """Its tokens are those of the text, divided among the layers of both passes."""
    bars = []
    monkeypatch.setattr(module, "tqdm", lambda **options: bars.append(tqdm(**options)) or bars[0])
    run[1](make_batches(4))
    assert bars[0].total == 4 * LENGTH == pytest.approx(bars[0].n)
