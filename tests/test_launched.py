"""Processes that were started together and would work as if each were alone are refused before anything is written."""

from collections.abc import Callable

import pytest

from moh_llm.devices import check_group, world_size
from moh_llm.errors import UserError

TOLD = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *TOLD)


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
        (TOLD, 2),
        (TOLD | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, 2),  # a launcher on each of four nodes
        (TOLD | {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, 1),
    ],
)
def test_the_size_of_a_job(launched, variables, size):
    launched(**variables)
    assert world_size() == size
    check_group(size)


@pytest.mark.parametrize(
    ("variables", "group", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, 1, "SLURM_STEP_NUM_TASKS=4: 4 processes .* know nothing of each other"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, "OMPI_COMM_WORLD_SIZE=2: 2 processes"),
        ({"PMI_SIZE": "2"}, 1, "PMI_SIZE=2: 2 processes"),
        (TOLD, 1, "WORLD_SIZE=2: 2 processes were started, and they know nothing of each other"),
        (TOLD | {"WORLD_SIZE": "4"}, 2, "WORLD_SIZE=4: 4 processes were started, and they form a group of 2"),
        ({"WORLD_SIZE": "2"}, 2, "WORLD_SIZE=2, but RANK and MASTER_ADDR are not set"),
    ],
)
def test_a_group_that_is_not_what_was_started(launched, variables, group, message):
    launched(**variables)
    with pytest.raises(UserError, match=f"{message}.*accelerate launch or torchrun.*or unset the variable"):
        check_group(group)


@pytest.mark.parametrize(
    "variables", [{"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, TOLD | {"RANK": "1"}], ids=["srun", "torchrun"]
)
def test_only_the_first_process_says_so(launched, variables, capsys):
    launched(**variables)
    with pytest.raises(SystemExit, match="2"):
        check_group(1)
    assert capsys.readouterr() == ("", "")
