"""Refusing a recipe that this machine cannot carry out, before a model is loaded."""

import torch

from moh_llm.errors import UserError
from moh_llm.machine import check_memory, check_workers, memory_bytes
from moh_llm.training.config import TrainConfig
from moh_llm.training.inputs import read_model_config
from moh_llm.training.memory import Sizes, estimate_memory

_BYTES_PER_TOKEN = 24  # of a step's batch: input, position, label
# The estimate is good to some 15 % (docs/training.md); only what is far beyond memory is refused.
_CERTAIN = 1.5


def check_machine(config: TrainConfig, processes: int) -> None:
    """Raise UserError for more workers, a larger batch, or more memory of a processor than there can be.

    Args:
        config: the recipe.
        processes: that share the batch.
    """
    data = config.data
    check_workers(data.num_workers, "data.num_workers")
    batch = _BYTES_PER_TOKEN * data.batch_size * data.block_length // processes
    check_memory(batch, f"a step of data.batch_size={data.batch_size:,} blocks", "lower it")
    model = read_model_config(config)
    if config.lora is not None and config.lora.rank > model.hidden_size:
        raise UserError(
            f"lora.rank={config.lora.rank} must be at most hidden_size={model.hidden_size}: adapters of a higher rank "
            "are no smaller than the weights"
        )
    if torch.cuda.is_available():
        return
    needed = estimate_memory(config, model, Sizes.of(config, model), "one", 1).total
    way_out = "lower data.micro_batch_size or data.block_length, or set gradient_checkpointing (see moh-llm doctor)"
    check_memory(needed, "training", way_out, available=round(_CERTAIN * memory_bytes()))
