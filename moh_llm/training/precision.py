"""What `mixed_precision: auto` stands for: decided once, when a run starts. The rest of training sees no or bf16.

A run keeps what it chose, so that a resume computes the same on another machine.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator

from moh_llm.devices import COMPUTE_DTYPE, compute_dtype, computes_bfloat16_fast, name_device, own_device
from moh_llm.errors import UserError
from moh_llm.records.run import RunRecord
from moh_llm.training.config import TrainConfig
from moh_llm.training.parallel import any_process, from_main
from moh_llm.training.runs import RECORD

_NAMES: dict[torch.dtype, Literal["no", "bf16"]] = {torch.float32: "no", torch.bfloat16: "bf16"}


def decide_precision(config: TrainConfig, overwrite: bool = False, dtype: torch.dtype | None = None) -> TrainConfig:
    """The recipe with `mixed_precision` of "no" or "bf16" in place of "auto".

    Args:
        config: the recipe.
        overwrite: whether a run in ``config.output_dir`` is started anew; else "auto" is what that run chose.
        dtype: what a new run computes in; None: what this process's device computes fast.

    Raises:
        UserError: the environment asks for a dtype that training has not.
    """
    if config.mixed_precision != "auto":
        return config
    chosen = None if overwrite else _recorded(config)
    if chosen is None:
        chosen = _NAMES.get(dtype or compute_dtype(own_device()))
    if chosen is None:
        raise UserError(
            f"{COMPUTE_DTYPE}=float16: training computes in bfloat16 or float32; set mixed_precision to bf16 or no"
        )
    return replace(config, mixed_precision=chosen)


def _recorded(config: TrainConfig) -> Literal["no", "bf16"] | None:
    """What the run in the output folder chose; None where there is no run."""
    with contextlib.suppress(UserError):  # a damaged record is reported where the run is opened
        place = Path(config.output_dir, RECORD)
        given = RunRecord.read(place).config.get("mixed_precision") if place.is_file() else None
        return given if given in _NAMES.values() else None
    return None


def check_agreement(accelerator: Accelerator, config: TrainConfig) -> None:
    """Raise UserError, on one process, unless all of them decided for one precision."""
    first = from_main(accelerator, lambda: config.mixed_precision)
    if any_process(accelerator, first != config.mixed_precision)[0]:
        from_main(accelerator, _refuse)


def _refuse() -> None:
    raise UserError(
        "mixed_precision=auto stands for bf16 on some of the processes and for no on others, whose devices differ: "
        "set it to bf16 or no"
    )


def slow_precision(config: TrainConfig, device: torch.device) -> str | None:
    """A line for the user where the run computes in bfloat16 on a device that is slow at it; else None."""
    if config.mixed_precision != "bf16" or computes_bfloat16_fast(device):
        return None
    return f"{name_device(device)} computes bfloat16 slower than float32; a new run with mixed_precision=no is faster"
