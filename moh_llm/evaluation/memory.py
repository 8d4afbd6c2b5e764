"""How many sequences fit: what one of them takes in memory, and how much of that is free."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

# lm-eval's own upper bound. On a CPU, passes of more tokens than this take longer in the same measure.
_MOST_SEQUENCES = 64
_CPU_TOKENS = 4096
# The rest is for what is not counted and for fragmentation.
_SHARE_OF_FREE = 0.6


def choose_batch_size(
    config: "PreTrainedConfig", dtype: "torch.dtype", device: "torch.device", tokens: int, scored: int
) -> int:
    """The power of two of sequences of ``tokens`` tokens, ``scored`` of them with logits, that fits on ``device``."""
    fit = int(_SHARE_OF_FREE * free_memory(device)) // bytes_per_sequence(config, dtype.itemsize, tokens, scored)
    if device.type == "cpu":
        fit = min(fit, _CPU_TOKENS // tokens)
    fit = max(1, min(fit, _MOST_SEQUENCES))
    return 1 << (fit.bit_length() - 1)


def bytes_per_sequence(config: "PreTrainedConfig", itemsize: int, tokens: int, scored: int) -> int:
    """Bytes that one sequence takes at the peak of a forward pass without gradients, about."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    logits = 2 * scored * config.vocab_size * itemsize  # and their log-probabilities
    cache = 2 * tokens * config.num_hidden_layers * groups * head_dim * itemsize
    # One layer at a time: residual, norms, queries, outputs; gate, up and their product.
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    layer = tokens * (4 * config.hidden_size + 2 * heads * head_dim + 3 * inner) * itemsize
    if getattr(config, "_attn_implementation", None) == "eager":
        layer += 2 * heads * tokens * tokens * 4
    return logits + cache + layer


def free_memory(device: "torch.device") -> int:
    """Bytes that this process may still take on a device; for a CPU its part of what the machine or container has."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # where nothing better is known
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()).isdecimal():
        free = min(free, max(0, int(limit) - int((group / "memory.current").read_text())))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
