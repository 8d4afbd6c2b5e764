"""What `recipes/accelerate` and `recipes/launch` ship can be read by those it is for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from moh_llm.commands.launch import AGAIN
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training.step import TrainingStep

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted((RECIPES / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_takes_its_configs(path: Path) -> None:
    config = load_config_from_file(str(path))  # refuses unknown keys
    assert f"recipes/accelerate/{path.name}" in path.read_text()  # the command above it
    if path.stem.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] in MoHLlamaForCausalLM._no_split_modules
        assert set(TrainingStep._no_split_modules) == set(MoHLlamaForCausalLM._no_split_modules)


@pytest.mark.parametrize("path", sorted((RECIPES / "launch").iterdir()), ids=lambda path: path.name)
def test_launchers_are_valid_shell(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.stat().st_mode & 0o100, "not executable"


@pytest.fixture
def environment() -> dict[str, str]:
    """Variables of a launcher on the CPU, with this Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    nodes = {"NODES": "1", "NODE_RANK": "0", "MASTER": "localhost", "PORT": f"{20000 + os.getpid() % 20000}"}
    python = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPES.parent)}
    return os.environ | {"PATH": path, "GPUS": "1"} | nodes | python


@pytest.mark.slow
def test_paths_are_relative_to_the_callers_folder(recipe: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    words = ["ddp", recipe.name, "--output-dir", "here", "--max_steps", "1"]
    ended = subprocess.run(
        [RECIPES / "launch" / "many_nodes.sh", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "here" / "model" / "config.json").is_file()


@pytest.mark.slow
def test_a_signal_to_the_launcher_ends_the_run_in_one_line(
    recipe: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    environment["GPUS"] = "2"
    words = ["ddp", recipe, "--max_steps", "100000", "--checkpoint.save_steps", "100000"]
    words += ["--evaluation.eval_steps", "0"]
    log = tmp_path / "run" / "log.jsonl"
    command = [str(word) for word in [RECIPES / "launch" / "one_node.sh", *words]]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        while launcher.poll() is None and not (log.exists() and log.read_text().count("\n") >= 3):
            time.sleep(0.1)
        launcher.send_signal(signal.SIGUSR1)
        said, errors = launcher.communicate()
    assert launcher.returncode == 0, errors
    assert "stopped by a signal after step" in said
    assert "Traceback" not in errors
    assert errors.endswith(f"stopped by SIGUSR1, as asked; {AGAIN}\n") and errors.count("SIGUSR1") == 1
    steps = len(log.read_text().splitlines())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
