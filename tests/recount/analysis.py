"""What the analysis of an evaluated model's heads should hold, on the benchmarks' prompts."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from recount import costs, network
from recount.leaves import TIME, Near
from recount.prompts import items
from recount.text import Split, Window

ROW, OF_A_TEXT, COSTLY = 512, 1024, 2048  # tokens: of a row, read of a text, and of all texts for similarity
SENTENCE = "When the rain stopped, Anna counted 12 boats on the river and asked why none of them had moved."
LENGTHS = (128, 256, 512, 1024)  # tokens, that costs are stated at
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Config = dict[str, Any]


@torch.no_grad()
def expected(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, Any]:
    """The whole record of the analysis."""
    config, model = json.loads((folder / "config.json").read_text()), network.load(folder)
    streams = {name: _stream(tokenizer, [item.text for item in found]) for name, found in items().items()}
    passes = {name: _passes(model, stream, OF_A_TEXT) for name, stream in streams.items()}
    everything = [one for found in passes.values() for one in found]
    last = max(layer for layer in range(2) if costs.routed(config, layer))
    tokens = {name: sum(len(one.logits) for one in found) for name, found in passes.items()}
    loads = {name: _loads(found) for name, found in passes.items()}
    shared = costs.shared_heads(config)
    of_texts = {name: _scores(config, found, last) for name, found in passes.items()}
    return {
        "heads": 8,
        "num_active": costs.per_layer(config, "num_active_heads"),
        "all_heads_until": costs.all_heads_until(config),
        "device": "cpu",
        "dtype": "float32",
        "head_load": {
            "tokens": sum(tokens.values()),
            "load": [_shares(load) for load in _loads(everything)],
            "shared_heads": shared,
        },
        "head_load_by_text": {
            "layer": last,
            "shared_heads": shared[last],
            "tokens": tokens,
            "load": {name: _shares(load[last]) for name, load in loads.items()},
        },
        "routing_scores": {
            "quantiles": list(QUANTILES),
            "layers": [_scores(config, everything, layer) for layer in range(2)],
        },
        "routing_scores_by_text": {"layer": last, "texts": of_texts},
        "token_heads": _token_heads(model, tokenizer, last),
        "similarity": _similarity(folder, streams),
        "feature_rank": _ranks(config, everything),
        "flops": [_flops(config, length) for length in LENGTHS],
        "seconds": TIME,
    }


def _stream(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Split:
    """The first 32 texts, of each its last tokens where it is longer than a row."""
    return Split([np.array(tokenizer(text)["input_ids"][-ROW:]) for text in texts[:32]])


def _windows(stream: Split, tokens: int) -> list[Window]:
    tokens = min(tokens, len(stream))
    return [stream.window(start, min(ROW, tokens - start)) for start in range(0, tokens, ROW)]


def _passes(model: nn.Module, stream: Split, tokens: int, patterns: bool = False) -> list[network.Pass]:
    return [network.run(model, ids, patterns) for window in _windows(stream, tokens) for _, ids in window.pieces]


def _loads(passes: list[network.Pass]) -> np.ndarray:
    """Share of tokens that have each head on, `[L, H]`."""
    return np.array(
        [torch.cat(gates).double().mean(0).numpy() for gates in zip(*(p.gates for p in passes), strict=True)]
    )


def _shares(load: np.ndarray) -> list[float]:
    return [float(share) for share in load]


def _scores(config: Config, passes: list[network.Pass], layer: int) -> dict[str, Any]:
    """Distributions of the scores of a layer's routed heads, of all and of those that are on."""
    heads = costs.routed(config, layer)
    if not heads:
        return dict.fromkeys(("shared", "routed", "selected"))
    logits = torch.cat([one.scores[layer] for one in passes])  # float32: one token's score is the threshold
    scores = (logits.sigmoid() if config["router_type"] == "threshold" else logits.softmax(-1)).double()
    on = torch.cat([one.gates[layer] for one in passes])[:, heads]
    return {"shared": None, "routed": _distribution(scores.flatten()), "selected": _distribution(scores[on])}


def _distribution(scores: torch.Tensor) -> dict[str, Any] | None:
    if not len(scores):
        return None
    values = np.sort(scores.numpy())
    ranks = [math.ceil(share * len(values)) - 1 for share in QUANTILES]
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    return {
        "quantiles": [Near(float(values[rank]), 2e-4) for rank in ranks],
        "histogram": [Near(int(count), 2) for count in counts],  # of scores at the edge of a bin
    }


def _token_heads(model: nn.Module, tokenizer: PreTrainedTokenizerBase, layer: int) -> dict[str, Any]:
    on = network.run(model, np.array(tokenizer(SENTENCE)["input_ids"])).gates[layer]
    return {"tokens": list(SENTENCE), "layers": [layer], "on": [on.tolist()]}


def _similarity(folder: Path, streams: dict[str, Split]) -> dict[str, Any]:
    """How alike heads are: 1 - half the mean distance of their attention, and the mean cosine of their outputs."""
    model, share = network.load(folder), COSTLY // len(streams)
    found: dict[str, Any] = {}
    for which in ("moh", "all_heads"):
        if which == "all_heads":
            model.set_active_heads(8)
        passes = [one for stream in streams.values() for one in _passes(model, stream, share, patterns=True)]
        patterns = [float(np.mean(np.concatenate([_alike(one.patterns[layer]) for one in passes]))) for layer in (0, 1)]
        outputs = [_cosine(passes, layer) for layer in (0, 1)]
        known = [value for value in outputs if value is not None]
        found[which] = {
            "patterns": patterns,
            "outputs": outputs,
            "mean_patterns": float(np.mean(patterns)),
            "mean_outputs": float(np.mean(known)) if known else None,
        }
    return found


def _alike(patterns: torch.Tensor) -> np.ndarray:
    """Of attention weights `[H, T, T]`, similarity of each pair of heads at each position."""
    weights, heads = patterns.double().numpy(), len(patterns)
    pairs = [(a, b) for a in range(heads) for b in range(a)]
    return np.concatenate([1 - 0.5 * np.abs(weights[a] - weights[b]).sum(-1) for a, b in pairs])


def _cosine(passes: list[network.Pass], layer: int) -> float | None:
    total, pairs = 0.0, 0
    for one in passes:
        heads = one.heads[layer].double().unflatten(-1, (8, -1))
        units = heads / heads.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        on = one.gates[layer]
        both = torch.tril(on[:, :, None] & on[:, None], diagonal=-1)
        total += float((units @ units.transpose(1, 2))[both].sum())
        pairs += int(both.sum())
    return total / pairs if pairs else None


def _ranks(config: Config, passes: list[network.Pass]) -> dict[str, Any]:
    """Ranks of what the shared and the routed heads of a layer give to the output projection."""
    found: dict[str, Any] = {"tokens": sum(len(one.logits) for one in passes)}
    for kind, heads_of in (
        ("shared", costs.shared_heads(config)),
        ("routed", [costs.routed(config, n) for n in (0, 1)]),
    ):
        found[kind] = [_rank(passes, layer, heads) for layer, heads in enumerate(heads_of)]
    return found


def _rank(passes: list[network.Pass], layer: int, heads: list[int]) -> dict[str, Any]:
    """Width, and how many singular values hold 99 % of the squares."""
    if not heads:
        return {"width": 0, "energy": 0}
    features = torch.cat([one.heads[layer].unflatten(-1, (8, -1))[:, heads].flatten(1) for one in passes])
    values = np.linalg.svd(features.double().numpy(), compute_uv=False)
    share = np.cumsum(values**2) / (values**2).sum()
    return {"width": features.shape[1], "energy": Near(int((share < 0.99).sum()) + 1, 1)}


def _flops(config: Config, length: int) -> dict[str, Any]:
    dense, moh = costs.forward_flops(config, length, dense=True), costs.forward_flops(config, length)
    return {"length": length, "moh": Near(moh, 8), "dense": Near(dense, 8)}
