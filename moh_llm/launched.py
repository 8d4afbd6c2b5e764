"""Whether the processes that a launcher started know of each other.

One that believes to be alone does the whole job, and so does each of the others, in the same folder.
"""

import os

from moh_llm.errors import UserError

# How many processes srun and MPI's starters started, and which one this is. SLURM_NTASKS says nothing: it is also set
# in the script of a batch job and in an interactive allocation, where a single process runs.
_STARTERS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
_WAY_OUT = "start them with accelerate launch or torchrun, once on each machine (recipes/launch)"


def world_size() -> int:
    """The processes of this job, as accelerate launch or torchrun told each of them; 1 without such a launcher.

    Raises:
        UserError: another launcher started several processes and told them nothing of each other, or they were not
            told which one each is and where they meet.
    """
    if "WORLD_SIZE" in os.environ:
        started = max(1, _number("WORLD_SIZE"))
        if started > 1 and (absent := [name for name in ("RANK", "MASTER_ADDR") if name not in os.environ]):
            _refuse("RANK", f"WORLD_SIZE={started}, but {' and '.join(absent)} are not set: no process finds another")
        return started
    for count, rank in _STARTERS.items():
        if (started := _number(count)) > 1:
            _refuse(rank, f"{count}={started}: {started} processes were started that know nothing of each other")
    return 1


def check_group(size: int) -> None:
    """Compare the number of processes that found each other with `world_size`.

    Raises:
        UserError: they differ.
    """
    if size != (started := world_size()):
        what = f"form a group of {size}" if size > 1 else "know nothing of each other"
        _refuse("RANK", f"WORLD_SIZE={started}: {started} processes were started, and they {what}")


def _refuse(rank: str, what: str) -> None:
    """Raise UserError on the first process, and end the others without a word."""
    if _number(rank) > 0:
        raise SystemExit(2)
    raise UserError(f"{what}; {_WAY_OUT}, or unset the variable to run one process alone")


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0
