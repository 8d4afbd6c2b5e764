"""FSDP2 on processes without a GPU, which Accelerate has no public way to ask for.

All edits of Accelerate's shared state are here; seen on 1.15.
"""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def shard_on_cpu(plugin: FullyShardedDataParallelPlugin) -> None:
    """Make FSDP of the accelerator that is set up, which otherwise takes several CPU processes for plain DDP."""
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
