"""Devices: the choice of a device and of its compute dtype, and processes that do not find each other."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from moh_llm import devices
from moh_llm.devices import (
    COMPUTE_DTYPE,
    check_group,
    choose_device,
    compute_dtype,
    computes_bfloat16_fast,
    own_device,
    world_size,
)
from moh_llm.errors import UserError


def test_the_device_that_is_named_or_there_is():
    assert choose_device("cpu") == torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert choose_device().type == (accelerator.type if accelerator else "cpu")
    with pytest.raises(UserError, match="--device nonsense: torch cannot use it"):
        choose_device("nonsense")


def test_a_process_of_several_has_an_accelerator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device() == torch.device("meta", 3)


@pytest.mark.parametrize(("factor", "dtype"), [(0.5, torch.bfloat16), (0.95, torch.float32)])
def test_auto_is_bfloat16_where_its_products_are_fast(monkeypatch: pytest.MonkeyPatch, factor, dtype) -> None:
    monkeypatch.delenv(COMPUTE_DTYPE)
    computes_bfloat16_fast.cache_clear()
    seconds = {torch.float32: 1.0, torch.bfloat16: factor}
    monkeypatch.setattr(devices, "_product_seconds", seconds.__getitem__)
    cpu = torch.device("cpu")
    assert compute_dtype(cpu) == dtype and compute_dtype(cpu, "float16") == torch.float16
    for asked, chosen in (("float32", torch.float32), ("float16", torch.float16), ("", dtype)):
        monkeypatch.setenv(COMPUTE_DTYPE, asked)
        assert compute_dtype(cpu) == chosen and compute_dtype(cpu, "bfloat16") == torch.bfloat16
    monkeypatch.setenv(COMPUTE_DTYPE, "int8")
    with pytest.raises(UserError, match=r"^MOH_LLM_COMPUTE_DTYPE=int8 must be auto, bfloat16, float16 or float32$"):
        compute_dtype(cpu)
    monkeypatch.undo()
    computes_bfloat16_fast.cache_clear()
    assert 0 < devices._product_seconds(torch.float32) < 60


def test_what_a_gpu_lacks_is_computed_on_the_cpu() -> None:
    """Read by torch when it is imported: the package sets it, and imports none."""
    code = "import moh_llm, os, sys; print('torch' in sys.modules, os.environ['PYTORCH_ENABLE_MPS_FALLBACK'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False 1\n"


# ---- processes

LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *LAUNCHED)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`launched(NAME="1", ...)`: the environment of a launcher, and nothing of another one's."""

    def set_up(**variables: str) -> None:
        for name in LAUNCHERS:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_up


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, 1),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, 1),  # srun --ntasks 1 in the script of a batch job
        (LAUNCHED, 2),
        (LAUNCHED | {"SLURM_STEP_NUM_TASKS": "4"}, 2),  # a launcher on each of four nodes
    ],
)
def test_the_size_of_a_job(launched, variables, size):
    launched(**variables)
    assert world_size() == size
    check_group(size)


@pytest.mark.parametrize(
    ("variables", "group", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, 1, "SLURM_STEP_NUM_TASKS=4: 4 processes .* are not connected"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, "OMPI_COMM_WORLD_SIZE=2: 2 processes"),
        (LAUNCHED | {"WORLD_SIZE": "4"}, 2, "WORLD_SIZE=4: 4 processes were started, and 2 of them are connected"),
    ],
)
def test_a_group_that_is_not_what_was_started(launched, variables, group, message):
    launched(**variables)
    with pytest.raises(UserError, match=f"{message}.*accelerate launch or torchrun"):
        check_group(group)


def test_only_the_first_process_says_so(launched, capsys):
    launched(**LAUNCHED | {"RANK": "1"})
    with pytest.raises(SystemExit, match="2"):
        check_group(1)
    assert capsys.readouterr() == ("", "")
