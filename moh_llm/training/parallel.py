"""One recipe on any number of processes: DDP, DeepSpeed ZeRO and FSDP2, as `accelerate launch` set them up.

Losses are sums over a process's sequences. Dividing them by the counts of the whole step, and undoing each
strategy's averaging of gradients, makes the curve the same for all.
"""

import contextlib
import hashlib
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    broadcast_object_list,
)

from moh_llm.devices import check_group, name_device, peak_flops, world_size
from moh_llm.errors import UserError
from moh_llm.flops import training_flops
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.training.config import TrainConfig
from moh_llm.training.fsdp_on_cpu import shard_on_cpu
from moh_llm.training.runs import TRACKERS

T = TypeVar("T")


def count_micro_batches(config: TrainConfig, processes: int) -> int:
    """Micro-batches of a step on each process. Raises UserError where they are not a whole number."""
    data = config.data
    count, rest = divmod(data.batch_size, data.micro_batch_size * processes)
    if rest:
        raise UserError(
            f"data.batch_size={data.batch_size} must be a multiple of data.micro_batch_size="
            f"{data.micro_batch_size} x {processes} processes; change one of them"
        )
    return count


def check_strategy(config: TrainConfig, strategy: str) -> None:
    """Raise UserError where bitsandbytes is not installed, or a strategy divides weights that it cannot divide."""
    if config.shared_heads is not None and strategy not in ("one", "ddp"):
        raise UserError(
            f"shared_heads and {strategy}: the logits of shared heads are not divided among processes; take ddp or one "
            "process, or set shared_heads to null"
        )
    if config.quantization is None:
        return
    if strategy not in ("one", "ddp"):
        raise UserError(
            f"quantization={config.quantization} and {strategy}: 4-bit weights are not divided among processes; "
            "take ddp or one process"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f'quantization={config.quantization} needs bitsandbytes; pip install "moh-llm[qlora]"')


def check_experts(config: TrainConfig, model: MoHLlamaConfig, divided: bool) -> None:
    """Raise UserError where a model's feed-forward experts would be quantized, or `divided` among processes."""
    if not model.num_local_experts or not (divided or config.quantization):
        return
    what = f"quantization={config.quantization}" if config.quantization else "zero3 and fsdp2"
    raise UserError(
        f"model={config.model} has feed-forward experts, which {what} cannot hold; take ddp, zero2 or one process, "
        "without quantization"
    )


def divides_weights(accelerator: Accelerator) -> bool:
    """Whether no process holds a whole model in training: FSDP2, ZeRO-3."""
    plugin = accelerator.state.deepspeed_plugin
    return accelerator.is_fsdp2 or (plugin is not None and plugin.zero_stage == 3)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of a run, set up from the environment that the launcher made.

    Raises:
        UserError: ``data.batch_size`` does not divide evenly, the recipe drops steps under DeepSpeed, quantized weights
            or logits of shared heads cannot be divided, or the launcher's processes are not connected.
    """
    # An earlier run in this process may have used another precision, and the state is a singleton.
    AcceleratorState._reset_state()
    micro_batches = count_micro_batches(config, world_size())
    for strategy in ("DEEPSPEED", "FSDP"):
        if _asked_for(strategy):
            check_strategy(config, strategy)
    check_strategy(config, "one")
    kwargs: dict[str, Any] = {}
    if _asked_for("DEEPSPEED"):
        if config.divergence.action == "skip":
            raise UserError(
                "divergence.action=skip: DeepSpeed has made its step before the gradient is known; "
                "take roll_back or stop, or another strategy"
            )
        plugin = DeepSpeedPlugin(
            gradient_accumulation_steps=micro_batches, gradient_clipping=config.optimizer.max_grad_norm
        )
        # There is no prepared loader to tell it.
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = config.data.micro_batch_size
        kwargs["deepspeed_plugin"] = plugin
        if not torch.accelerator.is_available():
            # The same without `cpu=True`, which would give DDP instead.
            kwargs["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    if _asked_for("FSDP"):
        # From the launcher's environment, but for this: `moh_llm.training.sharding` has every process read its slices.
        plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)
        if plugin.fsdp_version != 2:
            raise UserError("FSDP needs version 2 (fsdp_version: 2 in the accelerate config)")
        if plugin.activation_checkpointing:
            raise UserError("drop fsdp_activation_checkpointing and set gradient_checkpointing in the recipe")
        kwargs["fsdp_plugin"] = plugin
    # FSDP2 would keep each process's whole gradient from one micro-batch to the next: N times what it holds of it.
    each = _asked_for("FSDP")
    accumulation = GradientAccumulationPlugin(micro_batches, sync_with_dataloader=False, sync_each_batch=each)
    accelerator = Accelerator(
        # Without `cpu=True` each process without an accelerator takes itself for the only one.
        cpu=not torch.accelerator.is_available() and not _asked_for("DEEPSPEED"),
        mixed_precision=config.mixed_precision,
        gradient_accumulation_plugin=accumulation,
        log_with=list(config.report_to) or None,
        project_config=ProjectConfiguration(config.output_dir, logging_dir=str(Path(config.output_dir) / TRACKERS)),
        **kwargs,
    )
    if _asked_for("FSDP") and not torch.accelerator.is_available():
        shard_on_cpu(kwargs["fsdp_plugin"])
    check_group(accelerator.num_processes)
    return accelerator


def from_main(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Run ``action`` on the main process and return its result on all processes.

    A UserError in it ends all processes, so that none waits: the main process raises it, the others exit silently.
    """
    refusal: str | None = None
    result: T | None = None
    if accelerator.is_main_process:
        try:
            result = action()
        except UserError as error:
            refusal = str(error)
    if accelerator.num_processes > 1:
        refusal, result = broadcast_object_list([refusal, result])
    if refusal is not None:
        if not accelerator.is_main_process:
            raise SystemExit(2)
        raise UserError(refusal)
    return result  # type: ignore[return-value]


def _asked_for(what: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{what}", "false").lower() == "true"


def peak_rate(accelerator: Accelerator, config: TrainConfig, model: MoHLlamaConfig) -> float | None:
    """Tokens/s of training at the devices' peak FLOP/s; None where a peak is unknown.

    What is recomputed to save memory does not count as work.
    """
    peak = None if accelerator.device.type == "cpu" else peak_flops(name_device(accelerator.device))
    if peak is None:
        return None
    length = config.data.sequence_length
    flops = training_flops(model, length, config.objective.has_teacher, recompute=False, frozen=config.is_base_frozen)
    return accelerator.num_processes * peak * length / flops


def clip_gradients(accelerator: Accelerator, model: torch.nn.Module, limit: float | None) -> float:
    """Clip the gradient's l2 norm and return the norm before clipping. (DeepSpeed clips as it steps.)"""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    norm = accelerator.clip_grad_norm_(weights, limit if limit is not None else float("inf"))
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def seed_step(config: TrainConfig, step: int, process: int) -> None:
    """Seed the generators by step and process, so that their state need not be saved."""
    digest = hashlib.blake2b(f"{config.seed}/{step}/{process}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def end_distribution(accelerator: Accelerator) -> None:
    """Release the distributed model; from here on each process loads full models."""
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # under ZeRO-3 loading would wait for the other processes


@contextlib.contextmanager
def loading_full_models(accelerator: Accelerator) -> Iterator[None]:
    """Within the block this process loads full models beside a distributed one; the other processes need not wait."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        yield
        return
    from transformers.integrations import set_hf_deepspeed_config, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # as in `end_distribution`
    try:
        yield
    finally:
        set_hf_deepspeed_config(accelerator.state.deepspeed_plugin.dschf)


def sum_over_processes(accelerator: Accelerator, values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the processes, on all of them."""
    return accelerator.reduce(values, "sum") if accelerator.num_processes > 1 else values


def any_process(accelerator: Accelerator, *flags: bool) -> list[bool]:
    """For each flag whether it holds on any process; all of them get the same answer."""
    counts = torch.tensor([float(flag) for flag in flags], device=accelerator.device)
    return [count > 0 for count in sum_over_processes(accelerator, counts).tolist()]


SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interruption:
    """Within the block the signals are recorded and do not end the process: ``received`` says whether any came.

    Python allows this in the main thread only; in other threads signals are not handled.
    """

    def __init__(self) -> None:
        self.received, self._before = False, {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
