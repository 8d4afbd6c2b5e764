"""What is found about a job's model, text and output, with each fault."""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.model import read_weight_map
from moh_llm.training.config import TrainConfig
from moh_llm.training.loop import train
from moh_llm.training.preflight import check_output, diagnose
from moh_llm.training.preflight_inputs import (
    Finding,
    check_data,
    check_model,
    check_router_rate,
    input_sums,
    read_model_config,
)


@pytest.fixture
def make(configure: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """`configure`, of paths too."""
    return lambda **keys: configure(
        **{key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    )


@pytest.fixture
def model_copy(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model, its weights in one file."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    MoHLlamaForCausalLM.from_pretrained(model_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def tokens(model_folder: Path, mixture_file: Path, tmp_path: Path) -> Path:
    """The mixture, tokenised; source two may be read twice."""
    mixture = mixture_file.with_name("twice.yaml")
    mixture.write_text(mixture_file.read_text().replace("weight: 0.3", "max_epochs: 2\n    weight: 0.3"))
    folder = tmp_path / "tokens"
    assert main(["tokenize", str(mixture), "--tokenizer", str(model_folder), "--output", str(folder)]) == 0
    return folder


def the_fault(findings: Iterable[Finding]) -> str:
    """The text of the only fault."""
    (text,) = [finding.text for finding in findings if finding.state == "fault"]
    assert "\n" not in text
    return text


# ---- model


def test_incomplete_weights_are_refused(make, model_copy):
    config = make(model=model_copy)
    assert check_model(config, read_model_config(config)).state == "ok"
    held = load_file(model_copy / "model.safetensors")
    lost = sorted(held)[0]
    del held[lost]
    save_file(held, model_copy / "model.safetensors")
    with pytest.raises(UserError, match=f"the weights lack {lost}, which"):
        check_model(config, read_model_config(config))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "has model_type=llama, not moh_llama; convert it first"),
        ({"router_score": "weighted", "head_fallback": "none"}, "it is not its dense form, so there is no teacher"),
        ({"num_active_heads": 4}, "there is nothing for distillation to recover; set objective.kind to cross_entropy"),
    ],
)
def test_models_that_cannot_be_trained_so_are_refused(make, model_copy, fields, message):
    path = model_copy / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | fields))
    with pytest.raises(UserError) as error:
        read_model_config(make(model=model_copy))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sequences_in_which_all_heads_are_on_are_refused(make, model_copy):
    """There student and teacher are the same; cross-entropy has something to learn, and longer sequences have, too."""
    path = model_copy / "config.json"
    local = {"head_fallback": "local", "local_window": 8, "local_sinks": 2, "local_start": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | local))
    short, long = ({"model": model_copy, "data.sequence_length": length} for length in (64, 65))
    message = "data.sequence_length=64: .* all heads on for a document's first 64 tokens.*--context 512"
    by_text = {"objective.kind": "cross_entropy"}
    for keys in (short, short | by_text | {"freeze_base": True}):
        with pytest.raises(UserError, match=message) as error:
            read_model_config(make(**keys))
        assert "\n" not in str(error.value)
    assert read_model_config(make(**short, **by_text)).local_start == 64
    assert read_model_config(make(**long)).local_start == 64


# ---- text


def test_text_that_was_tokenised_is_counted_exactly(make, tokens, mixture_file):
    record = train(make())  # which leaves the same text's tokens in the cache
    for mixture in (tokens, mixture_file):
        tokenizer, *sources = check_data(make(**{"data.mixture": mixture}))
        assert (tokenizer.state, tokenizer.check) == ("ok", "tokenizer")
        for (name, entry), finding in zip(record.data_read.items(), sources, strict=True):
            has = record.data[name]["tokens"]
            text = f"{name}: {entry['tokens']:,} tokens to be read of {has:,}, {entry['epochs']:.2f} epochs"
            assert finding == ("ok", "data", text)


def test_too_little_text_is_a_fault(make, tokens):
    often = list(check_data(make(max_steps=2000, **{"data.mixture": tokens})))
    assert "source two would be read" in the_fault(often) and "max_epochs=2" in the_fault(often)
    assert often[1].state == "warning" and "so many repetitions" in often[1].text


def test_no_tokenizer_is_a_fault(make, model_copy):
    for path in model_copy.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer that loads" in the_fault(check_data(make(model=model_copy)))


# ---- output


def test_the_output_is_judged_as_training_would(make, tmp_path):
    def found(**keys: object) -> Finding:
        return check_output(make(**{"max_steps": 1} | keys))

    run = tmp_path / "run"
    assert found() == ("ok", "output", f"{run} is new")
    train(make(max_steps=1))
    assert found()[::2] == ("warning", f"{run} holds this run, finished; there would be nothing to do")
    with pytest.raises(UserError, match=r"different: data\.batch_size, seed"):
        found(seed=1, **{"data.batch_size": 8})
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"status": "running"}))
    assert found()[::2] == ("ok", f"{run} holds this run; it would resume after step-000001")
    shutil.rmtree(run / "checkpoints")
    assert found().state == "ok" and "from its start" in found().text
    (run / "run.json").unlink()
    with pytest.raises(UserError, match=r"is not empty and holds no run\.json"):
        found()


def test_tokens_without_a_row_are_warned_of(make, model_copy):
    tokenizer = AutoTokenizer.from_pretrained(model_copy)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.save_pretrained(model_copy)
    (warned,) = [finding for finding in check_data(make(model=model_copy)) if finding.state == "warning"]
    assert "<|user|>" in warned.text


@pytest.mark.parametrize(
    ("rope", "length", "factor"),
    [
        (None, 65, "1.016"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 129, "2.016"),
    ],
)
def test_sequences_beyond_the_positions_are_warned_of(make, model_copy, rope, length, factor):
    path = model_copy / "config.json"
    content = json.loads(path.read_text())
    if rope is not None:
        content["rope_parameters"] = rope | {"rope_theta": 10000.0}
    path.write_text(json.dumps(content))
    config = make(model=model_copy, **{"data.sequence_length": length})
    found = [finding.text for finding in diagnose(config).findings if finding.check == "positions"]
    assert len(found) == (factor is not None)
    assert not found or f'"factor": {factor} ' in found[0]


# ---- rates


@pytest.fixture
def loud(model_folder: Path, tmp_path: Path) -> Path:
    """The tiny model; the inputs of its last layer are fifty times as large."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "loud"))
    *_, last = sorted(name for name in read_weight_map(folder)[1] if name.endswith("input_layernorm.weight"))
    file = folder / read_weight_map(folder)[1][last]
    weights = load_file(file)
    file.unlink()  # it may be a link to the base's
    save_file(weights | {last: weights[last] * 50}, file, metadata={"format": "pt"})
    return folder


def test_the_largest_change_of_a_logit_is_that_of_adamws_first_step(loud):
    model = MoHLlamaForCausalLM.from_pretrained(loud)
    sums = input_sums(loud)
    assert sums.keys() == {*range(model.config.num_hidden_layers)}
    states = torch.randn(2000, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for number, layer in enumerate(model.model.layers):
        weight = torch.zeros(model.config.hidden_size, requires_grad=True)
        inputs = layer.input_layernorm(states).detach()
        changes = []
        for one in inputs[:50]:
            (step,) = torch.autograd.grad(one @ weight, weight)
            changes.append((1e-3 * step.sign() @ one).item())  # AdamW's first step
        assert sum(changes) / 50 == pytest.approx(1e-3 * sums[number], rel=0.1)


def test_large_inputs_are_warned_about_with_a_rate_that_is_not(loud, configure):
    config = MoHLlamaConfig.from_pretrained(loud)

    def check(rate: float | None):
        return check_router_rate(configure(model=str(loud), **{"optimizer.router_learning_rate": rate}), config)

    found = check(1e-2)
    last = config.num_hidden_layers - 1
    assert found.state == "warning" and f"in layer {last}, whose inputs are large" in found.text
    lower = float(re.search(r"set optimizer\.router_learning_rate to (\S+) at most", found.text)[1])
    assert check(lower).state == "ok" and check(2 * lower).state == "warning"
    # Without a rate of their own routers have that of the weights, 1e-3.
    assert "optimizer.learning_rate=0.001 changes" in check(None).text


def test_training_warns_and_goes_on(loud, configure):
    said: list[str] = []
    config = configure(model=str(loud), max_steps=1, **{"evaluation.eval_steps": 0, "data.sequence_length": 80})
    train(config, say=said.append)
    warnings = [line for line in said if line.startswith("warning: ")]
    assert any("set optimizer.router_learning_rate to" in line for line in warnings)
    assert any("data.sequence_length=80" in line for line in warnings)


def test_only_what_was_fitted_is_judged(paper_folder, loud, configure):
    assert check_router_rate(configure(model=str(paper_folder)), MoHLlamaConfig.from_pretrained(paper_folder)) is None
    (loud / "conversion.json").unlink()
    assert check_router_rate(configure(model=str(loud)), MoHLlamaConfig.from_pretrained(loud)) is None
