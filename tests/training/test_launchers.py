"""What `recipes/accelerate` and `recipes/launch` ship can be read by those it is for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

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


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["one_node.sh", "many_nodes.sh"])
def test_paths_are_relative_to_the_callers_folder(launcher: str, recipe: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "GPUS": "1",
        "NODES": "1",
        "NODE_RANK": "0",
        "MASTER": "localhost",
        "PORT": f"{20000 + os.getpid() % 20000}",
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPES.parent)}
    words = ["ddp", recipe.name, "--output_dir", "here", "--max_steps", "1"]
    ended = subprocess.run(
        [RECIPES / "launch" / launcher, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "here" / "model" / "config.json").is_file()
