"""The processes of one evaluation under `accelerate launch` or torchrun."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from moh_llm.devices import check_group, world_size
from moh_llm.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The processes of one evaluation; each has the whole model and scores every ``size``-th item."""

    rank: int = 0
    size: int = 1

    def gather(self, item: T) -> list[T]:
        """The item of every process, in the order of their ranks, on all of them."""
        if self.size == 1:
            return [item]
        import torch.distributed

        items: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(items, item)
        return items

    def share(self, make: Callable[[], T]) -> T:
        """Return the first process's result on all processes. A UserError there ends all of them."""
        return self.gather(self.agree(lambda: make() if self.rank == 0 else None))[0]  # type: ignore[return-value]

    def agree(self, action: Callable[[], T]) -> T:
        """This process's result of ``action``, once every process has one.

        A UserError on any of them ends them all, so that none waits for it: the first process raises the error,
        the others exit without a message.
        """
        problem: str | None = None
        try:
            result = action()
        except UserError as error:
            problem = str(error)
        for rank, theirs in enumerate(self.gather(problem)):
            if theirs is not None and self.rank > 0:
                raise SystemExit(2)
            if theirs is not None:
                raise UserError(theirs if rank == 0 else f"{theirs} (process {rank} of {self.size})")
        return result


def join() -> Team:
    """The processes of the launcher's environment; a process without a launcher is a team of one.

    Raises UserError where several processes were started that are not connected.
    """
    if world_size() == 1:
        return Team()
    import torch
    from accelerate import PartialState

    # Without a GPU, `cpu` must be given: otherwise each process assumes that it is the only one. The timeout is for a
    # process that waits for one whose items take longer.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(weeks=1))
    check_group(state.num_processes)
    return Team(state.process_index, state.num_processes)


def leave() -> None:
    """Close the connection to the other processes, if there is one."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
