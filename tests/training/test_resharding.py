"""A checkpoint is the same numbers, bit for bit, whoever reads it in and writes it out again.

Each run here loads the checkpoint of another and saves it at once, with other processes or under another strategy.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import forks
import pytest
import torch
from safetensors.torch import load_file
from trained import load_config, read_checkpoint, unfinish
from ways import ROOT, WAYS

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.run import CheckpointRecord
from moh_llm.training.loop import train
from moh_llm.training.saving import export_checkpoint

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
RESAVE = """
import os, sys
from pathlib import Path
from moh_llm.training import loop
from moh_llm.training.checkpoints import CheckpointWriter
from moh_llm.training.config import CheckpointConfig
from tests.trained import load_config
load = loop.load_checkpoint
def resave(folder, accelerator, model, optimizer, weights):
    updates = load(folder, accelerator, model, optimizer, weights)
    writer = CheckpointWriter(Path(sys.argv[3]), accelerator, model, optimizer, weights, CheckpointConfig())
    writer.begin(4, {"updates": updates, "seconds": 0.0})
    writer.wait()
    accelerator.wait_for_everyone()
    os._exit(0)
loop.load_checkpoint = resave
loop.train(load_config(sys.argv[1], [f"--output-dir={sys.argv[2]}", "--data.micro_batch_size=1"]))
"""


@pytest.fixture(scope="session")
def stopped(made_once: Callable[..., Path], write_recipe: Callable[[Path], Path]) -> Path:
    """One process's run that stopped after step 4, not to be changed."""

    def make(folder: Path) -> None:
        train(load_config(write_recipe(folder), ["--data.micro_batch_size=1"]))
        unfinish(folder / "run", 4)

    return made_once("stopped", make) / "run"


def resave(way: str, processes: int, recipe: Path, run: Path, output: Path) -> Path:
    """The checkpoint of a run, loaded and saved again; `output` is a run that stopped there, too."""
    shutil.copytree(run, output)
    words = ["-c", RESAVE, recipe, output, output / "again"]
    done = forks.run(*words, folder=ROOT, environment=WAYS[way], processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(output / "checkpoints")
    (output / "again").rename(output / "checkpoints")
    return output / "checkpoints" / "step-000004"


def assert_same_numbers(folder: Path, other: Path) -> None:
    mine, others = read_checkpoint(folder), read_checkpoint(other)
    assert mine.keys() == others.keys() and len(mine) % 3 == 0
    assert all(torch.equal(tensor, others[name]) for name, tensor in mine.items())
    records = [CheckpointRecord.read(each / "checkpoint.json") for each in (folder, other)]
    assert records[0].updates == records[1].updates == 4


@pytest.mark.slow
def test_parts_of_four_processes_are_read_by_any(stopped, recipe, tmp_path):
    whole = stopped / "checkpoints" / "step-000004"
    parts = resave("fsdp2", 4, recipe, stopped, tmp_path / "four")
    names = {f"{kind}-0000{rank}-of-00004.safetensors" for kind in ("model", "optimizer") for rank in (1, 2, 3, 4)}
    assert {path.name for path in parts.iterdir()} == names | {"checkpoint.json"}
    # Each number once, 12 bytes for a trained weight; a file is little more than a quarter.
    weights = sum(tensor.numel() for name, tensor in read_checkpoint(whole).items() if not name.startswith("exp_avg"))
    written = [path.stat().st_size for path in parts.glob("*.safetensors")]
    headers = sum(int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in parts.glob("*.safetensors"))
    assert sum(written) == 12 * weights + headers
    assert_same_numbers(parts, whole)
    for way in ("fsdp2", "ddp", "zero1", "zero2", "zero3"):
        saved = resave(way, 2, recipe, tmp_path / "four", tmp_path / way)
        assert_same_numbers(saved, whole)
        again = resave("fsdp2", 2, recipe, tmp_path / way, tmp_path / f"{way}-back")
        assert_same_numbers(again, whole)
    assert_same_numbers(resave("ddp", 1, recipe, tmp_path / "four", tmp_path / "one"), whole)


# ---- export


def test_an_export_of_the_last_step_is_the_runs_model(finished_run, tmp_path, capsys):
    checkpoint = os.path.relpath(finished_run / "checkpoints" / "step-000006")
    assert main(["checkpoint", "export", checkpoint, "--output-dir", str(tmp_path / "model")]) == 0
    said = capsys.readouterr().out
    assert "holds the model after step 6" in said and "thresholds" not in said
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (finished_run, tmp_path))
    assert a.keys() == b.keys() and all(torch.equal(weight, b[name]) for name, weight in a.items())
    entries = json.loads((tmp_path / "model" / "lineage.json").read_text())["entries"]
    assert entries[-1]["kind"] == "run" and entries[-1]["steps"] == 6


def test_an_export_of_a_run_with_a_budget_says_whose_thresholds_it_has(configure, budget_folder, tmp_path, capsys):
    config = configure(model=str(budget_folder), freeze_base=True, max_steps=1, **{"objective.keys": 0.7})
    train(config)
    step = f"{config.output_dir}/checkpoints/step-000001"
    assert main(["checkpoint", "export", step, "--output-dir", str(tmp_path / "model")]) == 0
    assert "thresholds are those of the step, and the plan that of the run's start" in capsys.readouterr().out
    exported, started = (MoHLlamaConfig.from_pretrained(folder) for folder in (tmp_path / "model", budget_folder))
    assert exported.active_heads_per_layer == started.active_heads_per_layer


def test_what_cannot_be_exported_is_refused(run, model_folder, tmp_path):
    with pytest.raises(UserError, match=r"is no complete checkpoint: .*checkpoint.json does not exist"):
        export_checkpoint(run, tmp_path / "model")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"model": {"sha256": "0" * 64}}))
    with pytest.raises(UserError, match="is not what the run in"):
        export_checkpoint(run / "checkpoints" / "step-000004", tmp_path / "model")
    of_images = {"config": record["config"] | {"images": {"train": "folder"}}}
    (run / "run.json").write_text(json.dumps(record | of_images))
    with pytest.raises(UserError, match="is a run on images: no model is made of its checkpoints"):
        export_checkpoint(run / "checkpoints" / "step-000004", tmp_path / "model")
    assert not (tmp_path / "model").exists()
