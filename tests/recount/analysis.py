"""What the analysis of an evaluated model's heads should hold, on the benchmarks' prompts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from recount import costs, network
from recount.leaves import TIME, Exempt, Near
from recount.prompts import items
from recount.text import Split

ROW, OF_A_TEXT = 512, 1024  # tokens of a row, and tokens that are read of a text
LENGTHS = (128, 256, 512, 1024)  # tokens, that costs are stated at
LOOPS = Exempt("tests/analysis/test_measures.py compares it with loops")


@torch.no_grad()
def expected(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, Any]:
    """The whole record of the analysis."""
    config, model = json.loads((folder / "config.json").read_text()), network.load(folder)
    last = max(layer for layer in range(2) if costs.routed(config, layer))
    shared, passes = costs.shared_heads(config), {}
    for name, found in items().items():
        # Of the first 32 prompts the last tokens, in rows.
        stream = Split([np.array(tokenizer(item.text)["input_ids"][-ROW:]) for item in found[:32]])
        size = min(OF_A_TEXT, len(stream))
        windows = [stream.window(start, min(ROW, size - start)) for start in range(0, size, ROW)]
        passes[name] = [network.run(model, ids) for window in windows for _, ids in window.pieces]
    tokens = {name: sum(len(one.logits) for one in found) for name, found in passes.items()}
    return {
        "heads": 8,
        "num_active": costs.per_layer(config, "num_active_heads"),
        "all_heads_until": costs.all_heads_until(config),
        "device": "cpu",
        "dtype": "float32",
        "head_load": {
            "tokens": sum(tokens.values()),
            "load": network.head_load([one for found in passes.values() for one in found]),
            "shared_heads": shared,
        },
        "head_load_by_text": {
            "layer": last,
            "shared_heads": shared[last],
            "tokens": tokens,
            "load": {name: network.head_load(found)[last] for name, found in passes.items()},
        },
        "similarity": LOOPS,
        "flops": [
            {
                "length": length,
                "moh": Near(costs.forward_flops(config, length), 8),
                "dense": Near(costs.forward_flops(config, length, dense=True), 8),
            }
            for length in LENGTHS
        ],
        "seconds": TIME,
    }
