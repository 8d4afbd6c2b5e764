"""What `conversion.json` and `lineage.json` of a converted model should hold."""

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch

from recount import costs, hashes, intervals, network
from recount.leaves import PLACE, TIME, Near
from recount.models import CALIBRATION_TOKENS, CONTEXT, HELDOUT_TOKENS, MADE, Model
from recount.text import Source, Window, first_windows, read_sources

EDGES = (0, 512)  # positions at which figures of documents as long as CONTEXT are split


class Recount(Model):
    """A model and what is computed of it for several records, when it is first asked for."""

    @cached_property
    def sources(self) -> list[Source]:
        return read_sources(self.mixture, self.base)

    @cached_property
    def base_network(self) -> torch.nn.Module:
        return network.load(self.base)

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.read("moh", "config.json")

    @cached_property
    def proof_text(self) -> list[tuple[str, Window]]:
        """Held-out windows of the conversion, with the names of their sources."""
        return held_out_windows(self.sources, CONTEXT, HELDOUT_TOKENS)

    @cached_property
    def proof(self) -> network.Comparison:
        """The converted model beside its base on these."""
        return network.compare(network.load(self.converted), self.base_network, self.proof_text)


def held_out_windows(sources: list[Source], length: int, tokens: int) -> list[tuple[str, Window]]:
    """Rows of the first tokens of held-out documents, each document's once, of the source that has the least so far.

    For lengths of 2,048 and fewer, and documents that the loss is taken on all tokens of.
    """
    waiting = {source.name: list(source.held_out.documents) for source in sources}
    taken, pieces = dict.fromkeys(waiting, 0), []
    while waiting:
        name = min(waiting, key=lambda n: taken[n] / next(s.share for s in sources if s.name == n))
        piece = waiting[name].pop(0)[:length] if waiting[name] else None
        total = sum(taken.values())
        if piece is None or (taken[name] and total >= length and total + len(piece) > tokens):
            del waiting[name]
        elif len(piece) > 1:
            pieces.append((name, piece))
            taken[name] += len(piece)
    pieces.sort(key=lambda piece: len(piece[1]) < length)
    rows: list[list[tuple[int, np.ndarray]]] = [[]]
    for number, (_, piece) in enumerate(pieces):
        left = length - sum(len(ids) for _, ids in rows[-1])
        if not left:
            rows.append([])
            left = length
        rows[-1].append((number, piece[:left]))
    found = []
    for row in rows:
        numbers = np.concatenate([np.full(len(ids), number) for number, ids in row])
        found.append((pieces[row[0][0]][0], Window(np.concatenate([ids for _, ids in row]), numbers)))
    return found


def figures(found: network.Comparison) -> dict[str, Any]:
    """A model's figures against its reference."""
    means = found.means
    return {
        "perplexity": math.exp(means[1]),
        "perplexity_ratio": math.exp(means[1] - means[2]),
        "ratio_interval": intervals.of_documents(found.sums, intervals.ratio),
        "kl": float(means[3]),
        "kl_interval": intervals.of_documents(found.sums, intervals.kl),
        "top1_agreement": Near(float(means[4]), found.ties / found.sums[:, 0].sum()),
    }


def expected_conversion(recount: Recount) -> dict[str, Any]:
    """The whole of `conversion.json`."""
    return {
        "moh_llm": PLACE,
        "versions": PLACE,
        "base": {
            "name": str(recount.base),
            "revision": None,
            "fingerprint": hashes.fingerprint(recount.base),
            "dense_sha256": hashes.hash_tensors(recount.base, lambda name: True),
        },
        "device": PLACE,
        "compute_dtype": "float32",
        "plan": _plan(recount),
        **({} if "preset" in MADE[recount.kind].options else {"calibration": _calibration(recount.sources)}),
        "parameters": {
            "dense": hashes.count(recount.base),
            "routers": hashes.count(recount.converted, lambda name: ".router." in name),
            "fallbacks": hashes.count(recount.converted, lambda name: ".fallback." in name),
        },
        "verification": _verification(recount),
        "made": hashes.model_hashes(recount.converted),
        "seconds": TIME,
    }


def _plan(recount: Recount) -> dict[str, Any]:
    options = MADE[recount.kind].options
    active = costs.per_layer(recount.config, "num_active_heads")
    assert sum(active) == options.get("num_active_heads", 6) * len(active)  # the paper's three quarters of 8
    return {
        "preset": options.get("preset"),
        "context": CONTEXT,
        "keys_read": Near(costs.keys_read(recount.config, CONTEXT), 5e-5),
    }


def _calibration(sources: list[Source]) -> dict[str, Any]:
    windows = first_windows(sources, CONTEXT, CALIBRATION_TOKENS)
    read = {name: CONTEXT * len(found) for name, found in windows.items()}
    return {
        "tokens": sum(read.values()),
        "tokens_of_source": read,
    }


def _verification(recount: Recount) -> dict[str, Any]:
    found = recount.proof
    loads = network.head_load(found.passes)
    return {
        "dtype": "float32",
        "all_heads_active": {"equals_base": _is_base(recount), "tokens": CONTEXT * _rows_at_once(recount)},
        "held_out_tokens": int(found.sums[:, 0].sum()),
        "held_out_documents": len(found.sums),
        "base_perplexity": math.exp(found.means[2]),
        "converted": figures(found),
        "heads_read": Near(sum(map(sum, loads)) / len(loads), 5.1e-5),
        "by_position": _by_position(found),
        "retrieval": [],  # from 2,048 tokens of context on
    }


def _by_position(found: network.Comparison) -> list[dict[str, Any]]:
    rows, parts = found.by_position, []
    for low, high in zip(EDGES, (*EDGES[1:], math.inf), strict=True):
        within = rows[(rows[:, 0] >= low) & (rows[:, 0] < high), 1:]
        if len(within):
            parts.append({"start": low, "tokens": len(within), "kl": intervals.kl(within.sum(0))})
    return parts


def _rows_at_once(recount: Recount) -> int:
    """Windows of the pass that proves equality: as many as are run at once, 2,048 tokens."""
    return min(2048 // CONTEXT, len(recount.proof_text))


@torch.no_grad()
def _is_base(recount: Recount) -> bool:
    """Whether with all heads on the converted model's logits are the base's."""
    moh = network.load(recount.converted)
    moh.set_active_heads(8)
    ids = torch.from_numpy(np.stack([window.ids for _, window in recount.proof_text[: _rows_at_once(recount)]]))
    return torch.equal(moh(ids).logits, recount.base_network(ids).logits)


def expected_lineage(recount: Recount) -> dict[str, Any]:
    """The whole of `lineage.json` of the converted model."""
    base, made = recount.base, recount.converted
    entry = {
        "kind": "conversion",
        "base": "base",
        "dense_sha256": hashes.hash_tensors(base, lambda name: True),
        "made": hashes.model_hashes(made),
    }
    return {"entries": [entry]}
