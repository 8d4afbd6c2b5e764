"""GPUs by name, the choice of a device, and processes that were started together and do not find each other."""

from collections.abc import Callable

import pytest
import torch

from moh_llm.devices import GPUS, check_group, choose_device, find_gpu, peak_flops, world_size
from moh_llm.errors import UserError


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),  # which an A100 is not
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("h100 pcie", 756),
    ],
)
def test_the_longest_name_of_which_all_words_occur_wins(name, teraflops):
    assert peak_flops(name) == teraflops * 1e12


@pytest.mark.parametrize("name", ["", "NVIDIA L40", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 3090", "cpu"])
def test_of_others_nothing_is_known(name):
    assert peak_flops(name) is None and find_gpu(name) is None


def test_memory_is_of_the_variant_that_is_named():
    assert find_gpu("NVIDIA A100-SXM4-40GB").memory < 40 * 2**30 < find_gpu("A100").memory
    assert all(20 * 2**30 < gpu.memory < 192 * 2**30 for gpu in GPUS.values())


def test_the_device_that_is_named_or_there_is():
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UserError, match="--device nonsense: torch cannot use it"):
        choose_device("nonsense")


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
        ({"WORLD_SIZE": "1"}, 1),
        ({"SLURM_NTASKS": "4"}, 1),  # in an interactive allocation
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
        ({"PMI_SIZE": "2"}, 1, "PMI_SIZE=2: 2 processes"),
        (LAUNCHED, 1, "WORLD_SIZE=2: 2 processes were started, and they are not connected"),
        (LAUNCHED | {"WORLD_SIZE": "4"}, 2, "WORLD_SIZE=4: 4 processes were started, and they form a group of 2"),
        ({"WORLD_SIZE": "2"}, 2, "WORLD_SIZE=2, but RANK and MASTER_ADDR are not set"),
    ],
)
def test_a_group_that_is_not_what_was_started(launched, variables, group, message):
    launched(**variables)
    with pytest.raises(UserError, match=f"{message}.*accelerate launch or torchrun.*or unset the variable"):
        check_group(group)


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, LAUNCHED | {"RANK": "1"}],
    ids=["srun", "torchrun"],
)
def test_only_the_first_process_says_so(launched, variables, capsys):
    launched(**variables)
    with pytest.raises(SystemExit, match="2"):
        check_group(1)
    assert capsys.readouterr() == ("", "")
