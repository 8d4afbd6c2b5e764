"""Two processes, however the weights are distributed, follow the curve of one, and go on from each other's checkpoints.

Processes of this machine, without a GPU: what is tested is the arithmetic and the checkpoints, not NCCL.
"""

import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import forks
import pytest
import torch
from safetensors.torch import load_file
from trained import load_config, read_checkpoint, read_log, unfinish
from ways import ROOT, WAYS

from moh_llm.training.loop import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed"),
]
STEPS = {"max_steps": 20, "data.batch_size": 8, "data.micro_batch_size": 2, "evaluation.eval_steps": 10}
STEPS |= {"checkpoint.save_steps": 10, "checkpoint.save_total_limit": 2}
STEPS |= {"gradient_checkpointing": "true"}
NUMBERS = {"loss", "kl", "cross_entropy", "balance_loss", "gradient_norm", "keys_read", "keys_multiplier"}
TRAIN = """
import sys
from moh_llm.training.loop import train
from tests.trained import load_config
train(load_config(sys.argv[1], sys.argv[2:]), say=print)
"""
# The gradient of the second step is not a number, and neither are the scores.
SPOILED = """
import sys
import torch
from moh_llm.training import loop
from moh_llm.training.step import TrainingStep
from tests.trained import load_config
at, seed, forward = {"step": 0}, loop.seed_step, TrainingStep.forward
def note(config, step, process):
    at["step"] = step
    seed(config, step, process)
def spoil(self, *given, **options):
    found = forward(self, *given, **options)
    spoiled = at["step"] == 2 and torch.is_grad_enabled()
    return torch.cat([found[:1] * torch.nan, found[1:-2], found[-2:] * torch.nan]) if spoiled else found
loop.seed_step, TrainingStep.forward = note, spoil
loop.train(load_config(sys.argv[1], sys.argv[2:]), say=print)
"""
# The second half of each step's sequences, which the second of two processes reads, has documents of 4 tokens alone; so
# has all of step 4, and the first micro-batch of step 6.
SHORT = """
import sys
import torch
from moh_llm.data.stream import SequenceStream
from moh_llm.training.loop import train
from tests.trained import load_config
read = SequenceStream.batch
def batch(self, first, count):
    found, numbers = read(self, first, count), torch.arange(first, first + count)
    step, place = numbers // 8 + 1, numbers % 8
    is_short = (place >= 4) | (step == 4) | ((step == 6) & (place < 2))
    places = torch.arange(found["position_ids"].shape[1]).expand_as(found["position_ids"])
    found["position_ids"] = torch.where(is_short[:, None], places % 4, places)
    return found
SequenceStream.batch = batch
train(load_config(sys.argv[1], sys.argv[2:]), say=print)
"""


def start(
    way: str,
    recipe: Path,
    output: Path,
    program: Sequence[str] = ("train.py",),
    processes: int = 2,
    **keys: object,
) -> "subprocess.CompletedProcess[str]":
    """`train.py RECIPE` or another program on some processes."""
    if way.startswith("zero"):
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed")
        if shutil.which("c++") is None and shutil.which("g++") is None:
            pytest.skip("DeepSpeed builds an extension, and there is no C++ compiler")
    steps = STEPS | keys
    words = [
        *program,
        str(recipe),
        "--output-dir",
        str(output),
        *(f"--{name}={value}" for name, value in steps.items()),
    ]
    return forks.run(*words, folder=ROOT, environment=WAYS[way], processes=processes)


def run(way: str, recipe: Path, output: Path, program: Sequence[str] = ("train.py",), **keys: object) -> str:
    """The same to its good end; returns what the first process printed."""
    done = start(way, recipe, output, program=program, **keys)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_same_run(folder: Path, other: Path) -> None:
    """Curves within 1e-5, tuned weights within what AdamW makes of rounding."""
    mine, others = read_log(folder), read_log(other)
    assert [line["step"] for line in mine] == [line["step"] for line in others] == list(range(21))
    for line, wanted in zip(mine[1:], others[1:], strict=True):
        for name in NUMBERS & wanted.keys():
            assert line[name] == pytest.approx(wanted[name], abs=1e-5), (line["step"], name)
        assert line["tokens_of_source"] == wanted["tokens_of_source"]
    assert mine[-1]["validation"]["kl"] == pytest.approx(others[-1]["validation"]["kl"], abs=1e-5)
    for load, wanted in zip(mine[-1]["routing"]["load"], others[-1]["routing"]["load"], strict=True):
        assert load == pytest.approx(wanted, abs=0.01)
    a, b = (load_file(each / "model" / "model.safetensors") for each in (folder, other))
    assert a.keys() == b.keys()
    for name, weight in a.items():
        torch.testing.assert_close(weight, b[name], atol=1e-4, rtol=0)


@pytest.fixture(scope="session")
def single(made_once: Callable[..., Path], write_recipe: Callable[[Path], Path], budget_folder: Path) -> Path:
    """One process's run, not to be changed."""

    def make(folder: Path) -> None:
        keys = STEPS | {"model": budget_folder, "output_dir": folder / "run"}
        words = [f"--{name}={value}" for name, value in keys.items()]
        train(load_config(write_recipe(folder), words))

    return made_once("single", make) / "run"


@pytest.fixture(scope="session")
def run_of(
    made_once: Callable[..., Path], write_recipe: Callable[[Path], Path], budget_folder: Path
) -> Callable[[str], Path]:
    """`run_of(way)`: two processes' run, not to be changed; what they printed is in `said.txt`."""

    def make(way: str, folder: Path) -> None:
        said = run(way, write_recipe(folder), folder / "run", ("-c", TRAIN), model=budget_folder)
        (folder / "said.txt").write_text(said)

    return lambda way: made_once(way, partial(make, way)) / "run"


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_follow_the_curve_of_one(single, run_of, way):
    folder = run_of(way)
    said = (folder.parent / "said.txt").read_text()
    assert "weights are trained on 2 x cpu" in said and "2 micro-batches per step" in said
    assert_same_run(folder, single)


def test_a_frozen_base_teaches_itself_on_two_processes_as_on_one(recipe, configure, tmp_path):
    train(configure(output_dir=str(tmp_path / "one"), **STEPS | {"freeze_base": True}))
    done = start("fsdp2", recipe, tmp_path / "two", freeze_base="true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("way", "freeze_base"), [("ddp", "true"), ("zero2", "true"), ("zero3", "true"), ("fsdp2", "true"), ("ddp", "false")]
)
def test_a_process_that_reads_short_documents_alone_takes_part(recipe, budget_folder, tmp_path, way, freeze_base):
    # DeepSpeed's AdamW moves all weights in every step, also those without a gradient.
    program = "-c", SHORT.replace("step == 4", "step == 0") if way.startswith("zero") else SHORT
    keys = {"model": budget_folder, "freeze_base": freeze_base}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        done = start(way if processes == 2 else "ddp", recipe, folder, program, processes, **keys)
        assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(tmp_path / "2", tmp_path / "1")


@pytest.mark.parametrize("way", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_step_whose_gradient_is_not_finite_leaves_the_weights_as_they_are(recipe, budget_folder, tmp_path, way):
    done = start(
        way,
        recipe,
        tmp_path / "run",
        ("-c", SPOILED),
        model=budget_folder,
        mixed_precision="bf16" if way == "fsdp2" else "no",  # scores and counts stay exact
        **{"max_steps": 4, "checkpoint.save_steps": 1, "checkpoint.save_total_limit": 9},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = read_log(tmp_path / "run")
    assert ["dropped" in line for line in lines] == [False, False, True, False, False]
    multipliers = [line["keys_multiplier"] for line in lines[1:]]
    assert 0 != multipliers[1] == multipliers[2] != multipliers[3] and "keys_read" not in lines[2]
    first, second = (read_checkpoint(tmp_path / "run" / "checkpoints" / f"step-00000{step}") for step in (1, 2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("way", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_one_process_resumes_the_run_of_two(single, run_of, configure, budget_folder, tmp_path, way):
    shutil.copytree(run_of(way), tmp_path / "back")
    unfinish(tmp_path / "back", 10)
    said: list[str] = []
    train(configure(model=str(budget_folder), output_dir=str(tmp_path / "back"), **STEPS), say=said.append)
    assert any("resumed from" in line and "step-000010" in line for line in said)
    assert_same_run(tmp_path / "back", single)
