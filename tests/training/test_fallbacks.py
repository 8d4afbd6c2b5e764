"""Fallbacks are part of the student from the first step, are trained by either method, and are saved."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from trained import read_log, unfinish

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.records.conversion import read_chain
from moh_llm.records.model import read_config
from moh_llm.training import networks
from moh_llm.training.loop import train
from moh_llm.training.reference import find_starting_point

CPU = torch.device("cpu")
METHODS = {"full": {}, "lora": {"lora.rank": 4}, "frozen": {"freeze_base": True}}


@pytest.mark.parametrize("method", METHODS)
def test_they_are_trained_and_saved(configure, model_folder: Path, read_tensors, method: str) -> None:
    config = configure(max_steps=2, **{"evaluation.eval_steps": 0, **METHODS[method]})
    train(config)
    before, after = read_tensors(model_folder), read_tensors(Path(config.output_dir) / "model")
    last = load_file(Path(config.output_dir) / "checkpoints" / "step-000002" / "model.safetensors")
    assert after.keys() == before.keys()
    names = [name for name in before if ".fallback." in name]
    assert len(names) == 2 * 3  # layers; the share's weight and bias, and the vector
    for name in names:
        (trained,) = (weight for full, weight in last.items() if full.endswith(name))
        assert torch.equal(after[name], trained) and not torch.equal(after[name], before[name]), name


@pytest.fixture(scope="session")
def local_folders(made_once, base_folder: Path, convert) -> dict[str, Path]:
    """Conversions with local fallbacks, routed by a linear map and by a threshold."""
    flags = ["--fallback", "local", "--local-window", "6", "local_sinks=2", "--context", "64"]
    flags += ["--num-active-heads", "2", "--heldout-tokens", "0", "--num-shared-heads", "1"]
    linear, threshold = ([*flags, "--router", router] for router in ("linear", "threshold"))
    return {
        "linear": made_once("local", lambda folder: convert(base_folder, folder, *linear)),
        "threshold": made_once("local-threshold", lambda folder: convert(base_folder, folder, *threshold)),
    }


@pytest.mark.slow
def test_a_frozen_base_stays_as_it_is_and_is_its_own_teacher(
    configure, local_folders, base_folder: Path, read_tensors, tmp_path: Path
) -> None:
    folder, base = local_folders["threshold"], read_tensors(base_folder)
    keys = {"freeze_base": True, "max_steps": 24, "optimizer.router_learning_rate": 1e-2, "evaluation.eval_steps": 24}
    for run in (tmp_path / "first", tmp_path / "second"):
        config = configure(model=str(folder), output_dir=str(run), **keys)
        start = find_starting_point(config)
        assert start.reference is not None and networks.make_teacher(config, start.reference, CPU) is None
        train(config)
        folder = run / "model"
        held = read_tensors(folder)
        assert all(torch.equal(held[name], weight) for name, weight in base.items())
        assert set(load_file(run / "checkpoints" / "step-000024" / "model.safetensors")) == {
            name for name in held if ".fallback." in name or ".router." in name
        }
    first, last = (read_log(tmp_path / name)[at]["validation"]["kl"] for name, at in (("first", 0), ("first", -1)))
    assert 0 < last < 0.98 * first
    assert [entry.freeze_base for entry in read_chain(folder).runs] == [True, True]
    assert main(["convert", str(folder), "--to-dense", "--output-dir", str(tmp_path / "dense")]) == 0
    assert read_config(tmp_path / "dense") == read_config(base_folder)  # without the budget, too
    assert read_tensors(tmp_path / "dense").keys() == base.keys()
    assert all(torch.equal(weight, base[name]) for name, weight in read_tensors(tmp_path / "dense").items())


def test_a_frozen_base_needs_something_to_train(configure, paper_folder: Path) -> None:
    with pytest.raises(UserError, match="freeze_base=true leaves nothing to train in model="):
        train(configure(model=str(paper_folder), max_steps=2, freeze_base=True))
    with pytest.raises(UserError, match=r"freeze_base=true leaves no weight for adapters: set lora to null"):
        configure(**{"freeze_base": True, "lora.rank": 4})


def test_sequences_that_see_all_leave_the_distant_token_as_it_is(configure, local_folders, read_tensors) -> None:
    keys = {"data.sequence_length": 6, "max_steps": 2, "evaluation.eval_steps": 0, "checkpoint.save_steps": 1}
    keys |= {"objective.kind": "cross_entropy", "evaluation.max_tokens": 64}
    config = configure(model=str(local_folders["linear"]), **keys)
    train(config)
    unfinish(Path(config.output_dir), 1)
    train(config)  # from a checkpoint of weights that had no gradient
    before, after = read_tensors(local_folders["linear"]), read_tensors(Path(config.output_dir) / "model")
    (name, *_) = [name for name in before if name.endswith("distant_value")]
    assert torch.equal(before[name], after[name])


def test_a_step_that_nothing_can_be_learned_from_leaves_a_frozen_base_as_it_is(
    configure, base_folder: Path, convert, read_tensors, tmp_path: Path
) -> None:
    """All documents end among the first tokens, which have all heads on: no fallback is read."""
    flags = ["--fallback", "local", "--context", "64", "--local-start", "16", "--heldout-tokens", "0"]
    assert convert(base_folder, tmp_path / "moh", *flags) == 0
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": f"{n:04}"}) + "\n" for n in range(500)))
    mixture = {"name": "short", "validation_share": 0.3, "sources": {"short": {"weight": 1, "files": "short.jsonl"}}}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(mixture))
    keys = {"data.sequence_length": 20, "data.mixture": str(tmp_path / "short.yaml"), "freeze_base": True}
    config = configure(model=str(tmp_path / "moh"), max_steps=2, **keys)
    train(config)
    assert [line["gradient_norm"] for line in read_log(Path(config.output_dir)) if line["step"]] == [0.0, 0.0]
    before, after = read_tensors(tmp_path / "moh"), read_tensors(Path(config.output_dir) / "model")
    # AdamW decays the routers, whose gradient is 0.
    assert all(torch.equal(after[name], weight) for name, weight in before.items() if ".router." not in name)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_local_fallbacks_are_trained_and_saved(
    configure, local_folders, base_folder: Path, read_tensors, method: str
) -> None:
    """With recomputation, distillation from the base, and packed documents."""
    folder = local_folders["threshold"]
    more = {"evaluation.eval_steps": 0, "gradient_checkpointing": True}
    config = configure(model=str(folder), max_steps=2, **more, **METHODS[method])
    train(config)
    before, after = read_tensors(folder), read_tensors(Path(config.output_dir) / "model")
    assert all(weight.isfinite().all() for weight in after.values())
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    for kind in (".fallback.distant_score.", ".fallback.distant_value", ".router."):
        assert any(kind in name for name in changed), kind
