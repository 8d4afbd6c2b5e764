import json
import threading
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moh_llm.errors import UserError
from moh_llm.training import checkpoints
from moh_llm.training.checkpoints import CHECKPOINT_RECORD, CheckpointWriter, load_checkpoint, newest_checkpoint
from moh_llm.training.config import CheckpointConfig


def network(seed: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(seed + 1):
        layer(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return layer, dict(layer.named_parameters()), optimizer


def save(folder: Path, *steps: int, keep_last: int = 9, milestone_every: int = 0) -> None:
    keep = CheckpointConfig(save_steps=1, save_total_limit=keep_last, milestone_every=milestone_every)
    layer, weights, optimizer = network(0)
    writer = CheckpointWriter(folder, Accelerator(), layer, optimizer, weights, keep)
    for step in steps:
        writer.begin(step, {"updates": step, "seconds": 1.5})
        writer.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_brings_back_weights_and_optimiser(tmp_path: Path) -> None:
    layer, weights, optimizer = network(2)
    writer = CheckpointWriter(tmp_path, Accelerator(), layer, optimizer, weights, CheckpointConfig())
    folder = writer.begin(3, {"updates": 3, "seconds": 1.5})
    writer.wait()
    layer, others, other_optimizer = network(1)
    load_checkpoint(folder, Accelerator(), layer, other_optimizer, others)
    for name, weight in weights.items():
        assert torch.equal(others[name], weight)
    states = [o.state_dict()["state"] for o in (optimizer, other_optimizer)]
    for number, state in states[0].items():
        assert all(torch.equal(states[1][number][name], value) for name, value in state.items())


def test_only_the_last_ones_and_milestones_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, 15, keep_last=2)
    assert names(tmp_path) == ["step-000010", "step-000015"]
    # A run that went back to an earlier step leaves no later checkpoint behind.
    save(tmp_path, 12, keep_last=2)
    assert names(tmp_path) == ["step-000010", "step-000012"]
    save(tmp_path / "milestones", 5, 10, 15, 20, 25, keep_last=1, milestone_every=10)
    assert names(tmp_path / "milestones") == ["step-000010", "step-000020", "step-000025"]


def test_the_newest_is_found(tmp_path: Path) -> None:
    said: list[str] = []
    assert newest_checkpoint(tmp_path / "none", said.append) is None
    save(tmp_path, 5, 10)
    (tmp_path / ".step-000015.123.tmp").mkdir()
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None and found[0].name == "step-000010" and found[1].step == 10
    assert names(tmp_path) == ["step-000005", "step-000010"] and "writing was interrupted" in said[0]


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "optimizer.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "optimizer.safetensors").write_bytes(content)


def edit_record(folder: Path, **fields: object) -> None:
    record = json.loads((folder / CHECKPOINT_RECORD).read_text())
    (folder / CHECKPOINT_RECORD).write_text(json.dumps(record | fields))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_bit, "optimizer.safetensors was changed (other bytes"),
        (lambda folder: (folder / CHECKPOINT_RECORD).unlink(), "checkpoint.json does not exist"),
        (lambda folder: edit_record(folder, step=1), "names step 1"),
    ],
)
def test_a_damaged_one_is_skipped_with_the_reason(tmp_path: Path, damage, reason: str) -> None:
    save(tmp_path, 5, 10)
    damage(tmp_path / "step-000010")
    said: list[str] = []
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None and found[0].name == "step-000005"
    assert len(said) == 1 and "step-000010" in said[0] and reason in said[0]


def test_a_failed_save_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5)

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("moh_llm.training.checkpoints.save_file", full)
    with pytest.raises(UserError, match=r"step-000010.*earlier checkpoints are untouched"):
        save(tmp_path, 10)
    assert names(tmp_path) == ["step-000005"]


def test_it_is_of_the_moment_when_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while it is written, and until it is complete nothing is there but a temporary folder."""
    changed = threading.Event()

    def save_when_changed(*given: object) -> None:
        assert changed.wait(60)
        save_file(*given)

    copy = checkpoints.copy_to_cpu
    monkeypatch.setattr(checkpoints, "copy_to_cpu", lambda *parts, **how: time.sleep(0.3) or copy(*parts, **how))
    monkeypatch.setattr(checkpoints, "save_file", save_when_changed)
    layer, weights, optimizer = network(2)
    wanted = [weight.detach().clone() for weight in weights.values()]
    wanted += [optimizer.state[weight]["exp_avg"].clone() for weight in weights.values()]
    writer = CheckpointWriter(tmp_path, Accelerator(), layer, optimizer, weights, CheckpointConfig())
    folder = writer.begin(3, {"updates": 3, "seconds": 1.5})
    writer.copied.result()
    layer(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert not folder.exists() and not writer.written.done()
    changed.set()
    writer.wait()
    assert names(tmp_path) == ["step-000003"]
    saved = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
    found = [saved[name] for name in weights] + [saved[f"exp_avg.{name}"] for name in weights]
    assert all(torch.equal(tensor, value) for tensor, value in zip(found, wanted, strict=True))


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    layer, weights, optimizer = network(0)
    with pytest.raises(UserError, match="of another model: extra"):
        more = weights | {"extra": torch.zeros(1)}
        load_checkpoint(tmp_path / "step-000005", Accelerator(), layer, optimizer, more)
