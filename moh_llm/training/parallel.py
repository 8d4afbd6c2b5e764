"""One recipe on any number of processes: DDP, DeepSpeed ZeRO and FSDP2, as `accelerate launch` sets them up.

Losses are sums over a process's sequences. They are divided by the counts of the whole step, and each strategy's
averaging of gradients is undone, so that the curve is the same for all.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    parse_flag_from_env,
)

from moh_llm.devices import Team, check_group, world_size
from moh_llm.errors import UserError
from moh_llm.training.config import TrainConfig
from moh_llm.training.runs import TRACKERS
from moh_llm.training.zero import by_deepspeed

T = TypeVar("T")


# ---- what a recipe and a strategy allow


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


def divides_weights(accelerator: Accelerator) -> bool:
    """Whether no process holds a whole model in training: FSDP2, ZeRO-3."""
    plugin = accelerator.state.deepspeed_plugin
    return accelerator.is_fsdp2 or (plugin is not None and plugin.zero_stage == 3)


# ---- the accelerator


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of a run, set up from the environment that the launcher made.

    Raises:
        UserError: ``data.batch_size`` does not divide evenly, the launcher's processes are not connected, or the
            accelerate config asks for what the recipe decides.
    """
    # An earlier run in this process may have used another precision, and the state is a singleton.
    AcceleratorState._reset_state()
    micro_batches = count_micro_batches(config, world_size())
    deepspeed, fsdp = (parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in ("DEEPSPEED", "FSDP"))
    on_cpu = not torch.accelerator.is_available()
    plugins: dict[str, Any] = {}
    if deepspeed:
        plugin = DeepSpeedPlugin(
            gradient_accumulation_steps=micro_batches, gradient_clipping=config.optimizer.max_grad_norm
        )
        # Accelerate would read it from the prepared loader, and there is none.
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = config.data.micro_batch_size
        plugins["deepspeed_plugin"] = plugin
        if on_cpu:  # `cpu=True` would give DDP instead
            plugins["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
    if fsdp:
        # Every process reads its slices itself (`moh_llm.training.sharding`).
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)
        if plugins["fsdp_plugin"].fsdp_version != 2:
            raise UserError("FSDP needs version 2 (fsdp_version: 2 in the accelerate config)")
        if plugins["fsdp_plugin"].activation_checkpointing:
            raise UserError("drop fsdp_activation_checkpointing and set gradient_checkpointing in the recipe")
        if config.mixed_precision == "bf16":
            from torch.distributed.fsdp import MixedPrecisionPolicy

            # Accelerate's own would also round what a step returns: losses, scores, and counts of keys.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            plugins["fsdp_plugin"].mixed_precision_policy = policy
    # FSDP2 reduces the gradient of every micro-batch: else each process would keep its whole gradient between them.
    accumulation = GradientAccumulationPlugin(micro_batches, sync_with_dataloader=False, sync_each_batch=fsdp)
    accelerator = Accelerator(
        # Without `cpu=True` each process without an accelerator takes itself for the only one.
        cpu=on_cpu and not deepspeed,
        mixed_precision=config.mixed_precision,
        gradient_accumulation_plugin=accumulation,
        log_with=list(config.report_to) or None,
        project_config=ProjectConfiguration(config.output_dir, logging_dir=str(Path(config.output_dir) / TRACKERS)),
        **plugins,
    )
    if fsdp and on_cpu:
        # Accelerate takes several processes on CPUs for DDP and has no public way to ask for FSDP2; seen on 1.15.
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugins["fsdp_plugin"]
    if deepspeed:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # until `dividing_as_zero3`
    check_group(accelerator.num_processes)
    return accelerator


@contextlib.contextmanager
def dividing_as_zero3(accelerator: Accelerator) -> Iterator[None]:
    """Within the block `from_pretrained` divides models if the strategy is ZeRO-3; elsewhere it loads whole ones."""
    if not by_deepspeed(accelerator):
        yield
        return
    from transformers.integrations import set_hf_deepspeed_config, unset_hf_deepspeed_config

    set_hf_deepspeed_config(accelerator.state.deepspeed_plugin.dschf)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()


# ---- what processes agree on


def from_main(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Run ``action`` on the main process and return its result on all processes.

    A UserError in it ends all processes, so that none waits: the main process raises it, the others exit silently.
    """
    return Team(accelerator.process_index, accelerator.num_processes).broadcast(action)


def main_first(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Run ``action`` on the main process, then on the others; return each one's result. UserErrors end all."""
    team = Team(accelerator.process_index, accelerator.num_processes)
    done = team.barrier(lambda: [action()] if accelerator.is_main_process else [])
    return team.barrier(lambda: done[0] if done else action())


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Within the block SIGTERM and SIGUSR1 do not end the process; the list gets those that came.

    Python allows this in the main thread only; in other threads signals are not caught.
    """
    received: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
        before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
