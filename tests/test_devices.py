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
    assert choose_device() == torch.device("meta")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device() == torch.device("meta", 3)
    monkeypatch.setenv("LOCAL_RANK", "4")  # refused elsewhere
    assert own_device() == torch.device("meta")


# ---- compute dtype


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float] | type[Exception]], None]:
    """`timed([1.0, 0.5])`: the seconds that float32 and bfloat16 take, or what the backend raises."""
    monkeypatch.delenv(COMPUTE_DTYPE)

    def set_up(outcome: list[float] | type[Exception]) -> None:
        def seconds(device: torch.device, rows: int, dtypes: tuple[torch.dtype, ...]) -> list[float]:
            if dtypes == (torch.float32,):
                return [rows * 1e-6]  # of many cores
            assert dtypes == (torch.float32, torch.bfloat16) and rows * 1e-6 >= devices._LEAST_SECONDS
            if isinstance(outcome, list):
                return outcome
            raise outcome("the backend lacks bfloat16")

        computes_bfloat16_fast.cache_clear()
        monkeypatch.setattr(devices, "_product_seconds", seconds)

    yield set_up
    computes_bfloat16_fast.cache_clear()


@pytest.mark.parametrize(
    ("outcome", "dtype"),
    [
        ([1.0, 0.5], torch.bfloat16),
        ([1.0, 0.95], torch.float32),  # not worth its rounding
        (RuntimeError, torch.float32),
    ],
)
def test_auto_is_bfloat16_where_its_products_are_fast(timed, outcome, dtype) -> None:
    timed(outcome)
    assert compute_dtype(torch.device("meta")) == compute_dtype(torch.device("meta"), "auto") == dtype
    assert compute_dtype(torch.device("meta"), "float16") == torch.float16


def test_a_real_product_is_timed() -> None:
    seconds = devices._product_seconds(torch.device("cpu"), 128, (torch.float32, torch.bfloat16))
    assert len(seconds) == 2 and all(0 < value < 60 for value in seconds)


def test_the_environment_says_what_auto_is(timed, monkeypatch: pytest.MonkeyPatch) -> None:
    timed([1.0, 0.5])
    for asked, dtype in (("float32", torch.float32), ("float16", torch.float16), ("", torch.bfloat16)):
        monkeypatch.setenv(COMPUTE_DTYPE, asked)
        assert compute_dtype(torch.device("cpu")) == dtype
        assert compute_dtype(torch.device("cpu"), "bfloat16") == torch.bfloat16
    monkeypatch.setenv(COMPUTE_DTYPE, "int8")
    with pytest.raises(UserError, match=r"^MOH_LLM_COMPUTE_DTYPE=int8 must be auto, bfloat16, float16 or float32$"):
        compute_dtype(torch.device("cpu"))


def test_what_a_gpu_lacks_is_computed_on_the_cpu() -> None:
    """Read by torch when it is imported: the package sets it, and imports none."""
    code = "import moh_llm, os, sys; print('torch' in sys.modules, os.environ['PYTORCH_ENABLE_MPS_FALLBACK'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False 1\n"


# ---- processes

LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *LAUNCHED)


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
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 1),  # in the script of a batch job
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1),  # srun --ntasks 1
        (LAUNCHED, 2),
        (LAUNCHED | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, 2),  # a launcher on each of four nodes
        (LAUNCHED | {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, 1),
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
        (LAUNCHED, 1, "WORLD_SIZE=2: 2 processes were started, and they are not connected"),
        (LAUNCHED | {"WORLD_SIZE": "4"}, 2, "WORLD_SIZE=4: 4 processes were started, and they form a group of 2"),
        ({"WORLD_SIZE": "2"}, 2, "WORLD_SIZE=2, but RANK and MASTER_ADDR are not set"),
    ],
)
def test_a_group_that_is_not_what_was_started(launched, variables, group, message):
    launched(**variables)
    with pytest.raises(UserError, match=f"{message}.*accelerate launch or torchrun.*or unset the variable"):
        check_group(group)


def test_only_the_first_process_says_so(launched, capsys):
    launched(**LAUNCHED | {"RANK": "1"})
    with pytest.raises(SystemExit, match="2"):
        check_group(1)
    assert capsys.readouterr() == ("", "")
