"""Several processes under `accelerate launch` or torchrun: who takes which items, and agreeing on what happened."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from moh_llm.devices import check_group, world_size
from moh_llm.errors import UserError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The processes of one evaluation; each has the whole model and scores every ``size``-th item."""

    rank: int = 0
    size: int = 1

    def gather(self, item: T) -> list[T]:
        """What every process hands in, in the order of their ranks, on all of them."""
        if self.size == 1:
            return [item]
        import torch.distributed

        items: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(items, item)
        return items

    def share(self, make: Callable[[], T]) -> T:
        """What the first process makes, on all of them. A UserError of its ends them all."""
        return self.together(lambda: make() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def together(self, action: Callable[[], T]) -> list[T]:
        """Every process's result of ``action``.

        A UserError on any of them ends them all, so that none waits for it: the first process raises the error,
        the others leave without a word.
        """
        problem: str | None = None
        result: T | None = None
        try:
            result = action()
        except UserError as error:
            problem = str(error)
        handed_in = self.gather((problem, result))
        for rank, (problem, _) in enumerate(handed_in):
            if problem is not None and self.rank > 0:
                raise SystemExit(2)
            if problem is not None:
                raise UserError(problem if rank == 0 else f"{problem} (process {rank} of {self.size})")
        return [result for _, result in handed_in]  # type: ignore[misc]


def join() -> Team:
    """The team that the launcher's environment describes; a process that was started alone is one of its own.

    Raises UserError where several were started that do not find each other.
    """
    if world_size() == 1:
        return Team()
    import torch
    from accelerate import PartialState

    # Without a GPU, and if it is not told, each process believes that it is the only one. The time is for a
    # process that waits for one whose items take longer.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(weeks=1))
    check_group(state.num_processes)
    return Team(state.process_index, state.num_processes)


def leave() -> None:
    """Close the connection to the other processes, if there is one."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def only_own_items(tasks: "list[ConfigurableTask]", team: Team) -> Iterator[None]:
    """Let lm-eval see, of each task, only the items that this process scores.

    lm-eval's own way of sharing draws the examples of a prompt from one sequence per process, so that prompts
    and scores depend on the number of processes. Here every process writes the prompts of all items, as a
    single one would, and keeps its own.
    """
    if team.size == 1:
        yield
        return
    try:
        for task in tasks:
            task.build_all_requests = _own_requests(task, team)  # type: ignore[method-assign]
        yield
    finally:
        for task in tasks:
            vars(task).pop("build_all_requests", None)
            vars(task).pop("doc_iterator", None)


def _own_requests(task: "ConfigurableTask", team: Team) -> Callable[..., None]:
    build, iterate = task.build_all_requests, task.doc_iterator

    def build_own(**arguments: Any) -> None:
        build(**arguments)
        task._instances = [request for request in task.instances if request.doc_id % team.size == team.rank]
        # From here on lm-eval goes through the items to score them.
        task.doc_iterator = lambda **which: (  # type: ignore[method-assign]
            (number, item) for number, item in iterate(**which) if number % team.size == team.rank
        )

    return build_own
