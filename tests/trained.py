"""Recipes with flags over them, reading the folder of a training run, and making a finished run an interrupted one."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moh_llm.flags import OptionParser
from moh_llm.recipe import read_options, recipe_values
from moh_llm.training.config import TrainConfig


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A recipe with flags over it, as `moh-llm train` reads them."""
    parser = OptionParser(add_help=False)
    parser.add_options(TrainConfig, joint="_")
    return read_options(TrainConfig, [*recipe_values(recipe), *parser.parse_args(overrides).given])


def read_log(folder: Path) -> list[dict[str, Any]]:
    """A run's log, without what may differ between two equal runs."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "timing"} for line in lines]


def read_record(folder: Path) -> dict[str, Any]:
    """A run's `run.json`."""
    return json.loads((folder / "run.json").read_text())


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, put together from the slices in its files, each number of which is there once."""
    slices: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                slices.setdefault(name, []).append((places[name]["saved_offsets"], file.get_tensor(name)))
    tensors = {}
    for name, parts in slices.items():
        ends = [[at + size for at, size in zip(offset, part.shape, strict=True)] for offset, part in parts]
        whole = torch.full([max(lengths) for lengths in zip(*ends, strict=True)], torch.nan)
        for (offset, part), end in zip(parts, ends, strict=True):
            place = tuple(slice(*each) for each in zip(offset, end, strict=True))
            assert whole[place].isnan().all()
            whole[place] = part
        assert not whole.isnan().any()
        tensors[name] = whole
    return tensors


def unfinish(folder: Path, step: int) -> None:
    """Make a finished run one that stopped right after the checkpoint of ``step``."""
    (folder / "run.json").write_text(json.dumps(read_record(folder) | {"status": "running"}))
    shutil.rmtree(folder / "model")
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
