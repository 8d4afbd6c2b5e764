"""What a run computes with: `mixed_precision: auto`, attention implementations, and the positions of the model.

The precision is decided once, when a run starts; the rest of training sees "no" or "bf16". A run keeps what it chose,
so that it computes the same when it is resumed on another machine.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from moh_llm.devices import COMPUTE_DTYPE, compute_dtype, own_device
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.run import RunRecord
from moh_llm.training.config import TrainConfig
from moh_llm.training.runs import RUN_RECORD

_NAMES: dict[torch.dtype, Literal["no", "bf16"]] = {torch.float32: "no", torch.bfloat16: "bf16"}


def decide_precision(config: TrainConfig, overwrite: bool = False) -> TrainConfig:
    """The recipe with `mixed_precision` of "no" or "bf16" in place of "auto".

    Without ``overwrite`` "auto" is what the run in ``config.output_dir`` chose, if there is one.

    Raises:
        UserError: the environment asks for another dtype.
    """
    if config.mixed_precision != "auto":
        return config
    chosen = None if overwrite else _recorded(config)
    chosen = chosen or _NAMES.get(compute_dtype(own_device()))
    if chosen is None:
        raise UserError(
            f"{COMPUTE_DTYPE}=float16: training computes in bfloat16 or float32; set mixed_precision to bf16 or no"
        )
    return replace(config, mixed_precision=chosen)


def _recorded(config: TrainConfig) -> Literal["no", "bf16"] | None:
    """What the run in the output folder chose; None where there is no run."""
    with contextlib.suppress(UserError):  # a damaged record is reported where the run is opened
        place = Path(config.output_dir, RUN_RECORD)
        given = RunRecord.read(place).config.get("mixed_precision") if place.is_file() else None
        return given if given in _NAMES.values() else None
    return None


def check_agreement(accelerator: Accelerator, config: TrainConfig) -> None:
    """Raise UserError, on one process, unless all of them decided for one precision."""
    if len(set(gather_object([config.mixed_precision]))) > 1:
        if not accelerator.is_main_process:
            raise SystemExit(2)
        raise UserError(
            "mixed_precision=auto stands for bf16 on some of the processes and for no on others, whose devices differ: "
            "set it to bf16 or no"
        )


FLASH = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}


def check_attention(config: TrainConfig, device: torch.device) -> None:
    """Raise UserError where ``attn_implementation`` cannot train on the device, or with other options of the recipe."""
    name = config.attn_implementation
    if name != "sdpa" and device.type != "cuda":
        raise UserError(f"attn_implementation={name} needs a CUDA device; set it to sdpa")
    if name not in FLASH:
        return
    if not FLASH[name]():
        raise UserError(f"attn_implementation={name} is not installed; install its package or set it to sdpa")
    if config.mixed_precision != "bf16":
        raise UserError(f"attn_implementation={name} computes in bfloat16; set mixed_precision to bf16")
    # transformers tells documents apart in batches of one row only; in others they would see each other.
    if config.data.micro_batch_size > 1:
        raise UserError(
            f"attn_implementation={name} keeps documents apart in batches of one sequence only; "
            "set data.micro_batch_size to 1"
        )


def check_positions(config: TrainConfig, model: MoHLlamaConfig) -> str | None:
    """A warning where sequences are longer than the model's positions; transformers computes them and says nothing."""
    rope, limit, length = model.rope_parameters or {}, model.max_position_embeddings, config.data.sequence_length
    # With other kinds of scaling the limit may be that of the model before it was scaled.
    if length <= limit or rope.get("rope_type", "default") not in ("default", "llama3", "longrope"):
        return None
    return (
        f"data.sequence_length={length} is above the {limit} positions of model={config.model}: longer documents have "
        "positions that it does not know. Lower it, or scale the rotary embedding in its config.json: "
        f'"rope_parameters" with "rope_type": "yarn", and "max_position_embeddings": {length}'
    )
