"""The proof can fail, and its figures are those of whole models."""

import re
import shutil
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM

from moh_llm.analysis.retrieval import Answer, Prompt, score
from moh_llm.conversion import convert as convert_module
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.verify import retrieval_prompt, verify
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.model import read_weight_map


@pytest.fixture(scope="module")
def folders(make_llama, convert, tmp_path_factory):
    """A base of three layers and its conversion, with uneven budgets."""
    base, moh = make_llama(num_hidden_layers=3), tmp_path_factory.mktemp("out") / "moh"
    assert convert(base, moh, "--keys", "0.7", "--heldout-tokens", "0") == 0
    assert len(set(AutoConfig.from_pretrained(moh).active_heads_per_layer)) > 1
    return base, moh


@pytest.fixture(scope="module")
def batches():
    """Two batches of packed documents."""
    ids = torch.randint(1, 257, (3, 32), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).repeat(3, 1)
    positions[:, 11:] -= 11
    labels = ids.clone()
    labels[:, [0, 11]] = -100
    documents = (labels == -100).flatten().cumsum(0).view_as(labels)
    parts = zip(ids.split(2), positions.split(2), labels.split(2), documents.split(2), strict=True)
    return [{"input_ids": i, "position_ids": p, "labels": t, "documents": d} for i, p, t, d in parts]


def layerwise(folder):
    config, cpu = AutoConfig.from_pretrained(folder), torch.device("cpu")
    return LayerwiseModel(folder, read_weight_map(folder)[1], config, torch.float32, cpu)


def change_one_weight(folder, name):
    file = folder / read_weight_map(folder)[1][name]
    tensors = load_file(file)
    tensors[name].view(-1)[5] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})


# Of the layers only: no other tensor is read twice.
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        *((1, f"self_attn.{letter}_proj") for letter in "qo"),
        (2, "mlp.down_proj"),
        (0, "input_layernorm"),
    ],
)
def test_one_changed_weight_is_found(folders, batches, tmp_path, one_thread, layer, name):
    base, moh = folders
    shutil.copytree(moh, tmp_path / "moh")
    change_one_weight(tmp_path / "moh", f"model.layers.{layer}.{name}.weight")
    with pytest.raises(UserError, match=f"layer {layer} with all heads on does not equal the base's"):
        verify(layerwise(base), layerwise(tmp_path / "moh"), batches)


def plain_figures(model, base, batches):
    """The figures of a model beside its base's by a loop over positions, in float64, sharing no code with the proof."""
    nats, reference, kl, agreement, count = 0.0, 0.0, 0.0, 0, 0
    for batch in batches:
        for ids, positions, labels in zip(
            *(batch[name] for name in ("input_ids", "position_ids", "labels")), strict=True
        ):
            inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
            own, wanted = (network(**inputs).logits[0].double().numpy() for network in (model, base))
            for position, label in enumerate(labels[1:].tolist()):
                if label == -100:
                    continue
                q, p = (
                    np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in (own[position], wanted[position])
                )
                kl += sum(p * (np.log(p) - np.log(q)))
                nats, reference = nats - np.log(q[label]), reference - np.log(p[label])
                agreement, count = agreement + (q.argmax() == p.argmax()), count + 1
    figures = {"perplexity": np.exp(nats / count), "perplexity_ratio": np.exp((nats - reference) / count)}
    return figures | {"kl": kl / count, "top1_agreement": agreement / count}, np.exp(reference / count), count


@pytest.mark.parametrize("plan", ["threshold", "query_norm"])
@torch.no_grad()
def test_figures_are_those_of_a_loop_over_positions(folders, batches, convert, tmp_path, one_thread, plan):
    base, moh = folders
    if plan == "query_norm":
        moh = tmp_path / "moh"
        assert convert(base, moh, "--preset", "paper", "--heldout-tokens", "0") == 0
    proof = verify(layerwise(base), layerwise(moh), batches)
    dense = LlamaForCausalLM.from_pretrained(base).eval()
    converted = MoHLlamaForCausalLM.from_pretrained(moh).eval()
    assert converted.config.router_type == plan
    expected, reference, count = plain_figures(converted, dense, batches)
    figures = proof.converted
    assert {figure: getattr(figures, figure) for figure in expected} == pytest.approx(expected, rel=1e-4)
    assert figures.kl_interval[0] < figures.kl < figures.kl_interval[1]
    assert proof.base_perplexity == pytest.approx(reference, rel=1e-5)
    assert (proof.held_out_tokens, proof.held_out_documents) == (count, 6) and count == 3 * 30
    assert (proof.dtype, proof.all_heads_active.tokens) == ("float32", 64)


def test_a_failed_proof_leaves_no_folder(make_llama, convert, tmp_path, monkeypatch, capsys):
    def write_badly(folder, *args):
        weight_map = write_weights(folder, *args)
        change_one_weight(folder, "model.layers.1.mlp.up_proj.weight")
        return weight_map

    write_weights = convert_module.write_weights
    monkeypatch.setattr(convert_module, "write_weights", write_badly)
    assert convert(make_llama(), tmp_path / "moh", "--preset", "paper") == 2
    error = capsys.readouterr().err
    assert "layer 1 with all heads on does not equal the base's; nothing was written" in error
    assert list(tmp_path.iterdir()) == []


def test_what_a_prompt_retrieves_is_what_whole_models_retrieve(folders, batches):
    """The other figures are the same with and without a prompt."""
    base, moh = folders
    ids = torch.randint(1, 257, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        models = LlamaForCausalLM.from_pretrained(base), MoHLlamaForCausalLM.from_pretrained(moh)
        likely = models[0](torch.tensor([ids])).logits[0].argmax(-1).tolist()
        ids[31] = likely[30]  # so that one answer is right
        answers = [Answer("copying", 20, 28, 36), Answer("passkey", 9, 31, 32), Answer("key-value", 9, 12, 14)]
        prompt = Prompt(ids, answers)
        found = verify(layerwise(base), layerwise(moh), batches, prompt)
        plain = verify(layerwise(base), layerwise(moh), batches)
        counts = [
            score(prompt, lambda ids, at, model=model: model(torch.tensor([ids])).logits[0, at]) for model in models
        ]
    assert found.model_copy(update={"retrieval": []}) == plain and plain.retrieval == []
    for row in found.retrieval:
        (of_base,), (own,) = (counts[i][row.task].values() for i in (0, 1))
        assert [row.asked, row.base, row.converted] == [of_base[1], of_base[0], own[0]]
        assert row.nats == pytest.approx((own[2] - of_base[2]) / row.asked, abs=1e-3)
    assert found.retrieval[1].base == 1 and found.retrieval[0].nats


@pytest.mark.parametrize(
    ("length", "seen", "distances"),
    [(2048, 132, range(256, 1281, 256)), (2048, 520, range(768, 1281, 256)), (8192, 260, range(1024, 7169, 1024))],
)
def test_a_text_of_each_length_is_asked_for_copies_and_uuids(length, seen, distances):
    def tokenizer(words: str, add_special_tokens: bool) -> dict[str, list[int]]:
        # A UUID has 36 of these tokens, about as many as in SmolLM2's tokenizer, and words have more.
        pieces = re.findall(r" ?\d|[a-z]|\W|[A-Z]+", words)
        return {"input_ids": [zlib.crc32(piece.encode()) for piece in pieces]}

    text = torch.arange(length)[None]
    prompt = retrieval_prompt([{"input_ids": text}], tokenizer, seen)
    assert {(answer.task, answer.distance) for answer in prompt.answers} == {
        (task, distance) for task in ("copying", "uuid") for distance in distances
    }
    for answer in prompt.answers:
        told = slice(answer.start - answer.distance, answer.stop - answer.distance)
        assert prompt.ids[answer.start : answer.stop] == prompt.ids[told]
    assert retrieval_prompt([{"input_ids": text}], tokenizer, length) is None  # all is in sight
