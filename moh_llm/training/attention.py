"""Which attention implementations a run can take: what each needs of the device, the packages and the recipe."""

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from moh_llm.errors import UserError
from moh_llm.training.config import TrainConfig

_FLASH = {
    "flash_attention_2": (is_flash_attn_2_available, "flash-attn"),
    "flash_attention_3": (is_flash_attn_3_available, "flash-attn-3"),
}


def check_attention(config: TrainConfig, device: torch.device) -> None:
    """Raise UserError where ``attn_implementation`` cannot train on the device, or with other keys of the recipe."""
    name = config.attn_implementation
    if name == "flex_attention" and device.type == "cpu":
        raise UserError(f"attn_implementation={name} has no backward pass on a CPU; set it to sdpa")
    if name not in _FLASH:
        return
    is_available, package = _FLASH[name]
    if device.type != "cuda":
        raise UserError(f"attn_implementation={name} needs a CUDA device; set it to sdpa")
    if not is_available():
        raise UserError(f"attn_implementation={name} needs the package {package}; install it or set it to sdpa")
    if config.mixed_precision != "bf16":
        raise UserError(f"attn_implementation={name} computes in bfloat16; set mixed_precision to bf16")
    # transformers tells documents apart in batches of one row only; in others they would see each other.
    if config.data.micro_batch_size > 1:
        raise UserError(
            f"attn_implementation={name} keeps documents apart in batches of one sequence only; "
            "set data.micro_batch_size to 1"
        )
