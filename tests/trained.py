"""Reading the folder of a training run, and making a finished run an interrupted one."""

import json
import shutil
from pathlib import Path
from typing import Any


def read_log(folder: Path) -> list[dict[str, Any]]:
    """A run's log, without what may differ between two equal runs."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "timing"} for line in lines]


def read_record(folder: Path) -> dict[str, Any]:
    """A run's `run.json`."""
    return json.loads((folder / "run.json").read_text())


def unfinish(folder: Path, step: int) -> None:
    """Make a finished run one that stopped right after the checkpoint of ``step``."""
    (folder / "run.json").write_text(json.dumps(read_record(folder) | {"status": "running"}))
    shutil.rmtree(folder / "model")
    for path in [*(folder / "checkpoints").iterdir(), *folder.glob("milestones/step-*")]:
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
