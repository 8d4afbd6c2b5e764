"""The benchmark of a GPU, with tiny shapes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu
import gpu_rows

SMALL = gpu_rows.SMALL


def rows_of(path: Path, section: str, seconds: float = 600) -> dict[str, gpu_rows.Row]:
    """The rows of a section that is measured in this process."""
    assert gpu.measure(section, path, time.time() + seconds, SMALL) == 0
    return gpu_rows.read_rows(path)


@pytest.mark.parametrize("section", [name for name in gpu.SECTIONS if name != "compile"])
def test_every_section_has_its_rows(tmp_path, section):
    rows = rows_of(tmp_path / "rows.jsonl", section)
    assert rows and all(row["section"] == section for row in rows.values())
    assert not [row for row in rows.values() if row.get("failed") == gpu_rows.LOST]


def test_a_section_without_time_is_cut_and_what_was_measured_is_not_measured_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    cut = rows_of(path, "decode", seconds=-1)
    assert cut and all(row["failed"] == gpu_rows.CUT for row in cut.values())
    later = rows_of(path, "decode")
    assert later.keys() == cut.keys() and not [row for row in later.values() if row.get("failed") == gpu_rows.CUT]
    lines = path.read_text()
    rows_of(path, "decode")
    assert path.read_text() == lines


def test_a_row_in_which_a_process_died_is_left_out_of_the_next_one(tmp_path):
    path, device = tmp_path / "rows.jsonl", torch.device("cpu")
    calls: list[str] = []

    def die() -> None:
        calls.append("bad")
        raise KeyboardInterrupt

    def record() -> gpu_rows.Record:
        return gpu_rows.Record(path, "any", time.time() + 60, gpu_rows.Clock(device, SMALL))

    runs = {"good": lambda: calls.append("good"), "bad": die}
    with pytest.raises(KeyboardInterrupt):
        record().cell("cell", runs, ["good"])
    record().cell("cell", runs, ["good"])
    rows = gpu_rows.read_rows(path)
    assert calls.count("bad") == 1 and rows["any; cell; bad"]["failed"] == gpu_rows.LOST
    assert rows["any; cell; good"]["ratio"] == [1, 1, 1]
    with path.open("a") as file:
        file.write('{"section": "any", "cell": "ce')  # cut off
    assert gpu_rows.read_rows(path) == rows


@pytest.mark.slow
def test_the_command_measures_in_processes(tmp_path):
    path = tmp_path / "rows.jsonl"
    # Machines with GPUs may lack the package's other dependencies.
    lacking = ["datatrove", "detect_secrets", "loguru", "peft", "pydantic", "rich", "tensorboard"]
    words = ["gpu.py", "--small", "--sections", "facts", "--minutes", "80", "--json", str(path)]
    start = f"import runpy, sys; sys.modules.update(dict.fromkeys({lacking})); sys.argv = {words}; "
    start += f"sys.path.insert(0, {str(Path(gpu.__file__).parent)!r}); "
    command = [sys.executable, "-c", start + f"runpy.run_path({gpu.__file__!r}, run_name='__main__')"]
    subprocess.run(command, capture_output=True, check=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(row["peer"] == "versions" and row.get("torch") == torch.__version__ for row in rows)
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "go on with --resume" in again.stderr
