"""Writing checkpoints while training goes on: complete, or not there at all.

A thread copies what the process writes to memory of its own while the next step computes its gradient, then writes and
hashes it. `checkpoint.json` is written when the parts of all processes are there, and only then the folder gets its
name.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from moh_llm.errors import UserError
from moh_llm.files import share_files
from moh_llm.records.run import CheckpointRecord
from moh_llm.records.seal import mark_files
from moh_llm.training.checkpoints import RECORD, checkpoint_folder
from moh_llm.training.config import CheckpointConfig
from moh_llm.training.runs import steps_of
from moh_llm.training.zero import ADAMW_MOMENTS, by_deepspeed, gather_state


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time; all processes call the same methods.

    Args:
        checkpoints: their folder.
        accelerator, model, optimizer: what was prepared.
        weights: the trained parameters by name.
        keep: how many are kept.
    """

    def __init__(
        self,
        checkpoints: Path,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, torch.Tensor],
        keep: CheckpointConfig,
    ):
        self._checkpoints, self._accelerator, self._keep = checkpoints, accelerator, keep
        self._model, self._optimizer, self._weights = model, optimizer, weights
        # Of its own, since the threads agree on a checkpoint while training sends, too.
        self._group = torch.distributed.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._folder = checkpoints
        self._copied: Future[dict[str, torch.Tensor]] | None = None
        self._written: Future[None] | None = None

    def begin(self, step: int, facts: dict[str, Any]) -> Path:
        """Begin to write the state after ``step`` steps, when the checkpoint before is there; return its folder.

        Then all but the ``save_total_limit`` newest and the milestones are removed. ``facts`` go into its record.
        """
        self.wait()
        self._folder, state = checkpoint_folder(self._checkpoints, step), self._state()
        # Gathered tensors are copies.
        self._copied = self._thread.submit(dict if by_deepspeed(self._accelerator) else _copy, state)
        self._written = self._thread.submit(self._write, step, facts, state, self._copied)
        return self._folder

    def hold(self) -> None:
        """Wait until the state is copied. To be called before the weights change."""
        if self._copied is not None:
            self._copied.result()

    @property
    def failed(self) -> bool:
        """Whether this process knows that the checkpoint cannot be written; `wait` says why."""
        return self._written is not None and self._written.done() and self._written.exception() is not None

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is there.

        Raises:
            UserError: the disk refuses (on the main process; the others exit). Earlier checkpoints are as they were.
        """
        written, self._written, self._copied = self._written, None, None
        if written is None:
            return
        try:
            written.result()
        except CheckpointException as error:
            if self._accelerator.is_main_process:
                shutil.rmtree(_temporary(self._folder), ignore_errors=True)
            for cause, _ in error.failures.values():
                if not isinstance(cause, (OSError, UserError)):
                    continue
                if not self._accelerator.is_main_process:
                    raise SystemExit(2) from error
                reason = getattr(cause, "strerror", None) or cause
                raise UserError(f"cannot write {self._folder}: {reason}; earlier checkpoints are untouched") from error
            raise

    def close(self) -> None:
        """Let what was begun end, also where training ends in an error; nothing can be begun any more."""
        self._thread.shutdown()

    def _write(
        self, step: int, facts: dict[str, Any], state: dict[str, torch.Tensor], copied: Future[dict[str, torch.Tensor]]
    ) -> None:
        """Write this process's part, and with the others make the checkpoint whole; in the thread."""

        def remove_old() -> None:
            _remove_old(self._checkpoints, step, self._keep)

        accelerator = self._accelerator
        part = f"-{accelerator.process_index + 1:05d}-of-{accelerator.num_processes:05d}" if self._group else ""
        writer = _Writer(self._folder, part, copied.result(), {"step": step, **facts}, remove_old)
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Of ``state``, whose values may have changed, sizes and offsets alone are asked.
        dcp.save(state, storage_writer=writer, planner=planner, process_group=self._group, no_dist=self._group is None)

    def _state(self) -> dict[str, torch.Tensor]:
        """What this process writes: slices that it alone holds, and its share of the tensors that all have."""
        accelerator, sizes = self._accelerator, [0] * self._accelerator.num_processes
        state = {}
        deepspeed = by_deepspeed(accelerator)
        for name, tensor in gather_state(self._model, self._weights) if deepspeed else self._held():
            if not hasattr(tensor, "to_local"):
                owner = sizes.index(min(sizes))
                sizes[owner] += tensor.numel()
                if owner != accelerator.process_index:
                    continue
            state[name] = tensor.cpu().contiguous() if deepspeed else tensor
        return state

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._weights.items():
            tensor, state = weight.detach(), self._optimizer.state[weight]
            yield name, tensor
            for moment in ADAMW_MOMENTS:  # a weight that has had no gradient has none
                yield f"{moment}.{name}", state[moment] if moment in state else torch.zeros_like(tensor)


def _copy(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in state.items()}
    return {name: part.to("cpu", torch.float32, copy=True).contiguous() for name, part in parts.items()}


class _Writer(dcp.StorageWriter):
    """Writes safetensors files, and no pickle, without a second copy; PyTorch's own stops all threads meanwhile.

    Args:
        folder: of the checkpoint.
        part: what tells a process's files from another's.
        copies: the tensors of this process.
        facts: for the record, which the main process writes.
        then: called there when the checkpoint is complete.
    """

    def __init__(
        self, folder: Path, part: str, copies: dict[str, torch.Tensor], facts: dict[str, Any], then: Callable[[], None]
    ):
        self._folder, self._part, self._copies, self._facts, self._then = folder, part, copies, facts, then

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the temporary folder; the others do not write before the plans went round."""
        if is_coordinator:
            shutil.rmtree(_temporary(self._folder), ignore_errors=True)
            _temporary(self._folder).mkdir(parents=True)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> "torch.futures.Future[list[WriteResult]]":
        """Write and hash this process's files."""
        files: dict[str, dict[str, tuple[int, ...]]] = {}
        for item in plan.items:
            name, chunk = item.index.fqn, item.tensor_data.chunk
            if all(chunk.sizes):  # a process may hold none of the rows
                file = f"{'optimizer' if name.startswith(ADAMW_MOMENTS) else 'model'}{self._part}.safetensors"
                files.setdefault(file, {})[name] = tuple(chunk.offsets)
        for file, offsets in files.items():
            places = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
            header = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
            tensors = {name: self._copies.pop(name) for name in offsets}
            try:
                save_file(tensors, _temporary(self._folder) / file, header)
            except SafetensorError as error:  # how it reports a full disk
                raise UserError(" ".join(str(error).split())[:200]) from error
        marks = mark_files(_temporary(self._folder), files)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([WriteResult(MetadataIndex(name), mark.bytes, mark) for name, mark in marks.items()])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the main process, when all have written: the record, then the folder's name."""
        files = {result.index.fqn: result.storage_data for part in results for result in part}
        CheckpointRecord(**self._facts, files=files).write(_temporary(self._folder) / RECORD)
        share_files(_temporary(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)  # one that was found broken
        os.replace(_temporary(self._folder), self._folder)
        self._then()

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a writer is for one checkpoint."""

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """The plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Folders are given to the class itself."""
        return False


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def _remove_old(checkpoints: Path, step: int, keep: CheckpointConfig) -> None:
    """Later steps than this one can only be checkpoints that were found broken at the last start."""
    steps = sorted(steps_of(checkpoints))
    kept = [other for other in steps if other <= step][-keep.save_total_limit :]
    if keep.milestone_every:
        kept += [other for other in steps if other <= step and other % keep.milestone_every == 0]
    for other in steps:
        if other not in kept:
            shutil.rmtree(checkpoint_folder(checkpoints, other), ignore_errors=True)
