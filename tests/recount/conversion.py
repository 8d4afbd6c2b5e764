"""What `conversion.json` and `lineage.json` of a converted model should hold."""

import math
from functools import cached_property
from typing import Any

import torch

from moh_llm.data.shards import TokenizedSource
from moh_llm.data.windows import validation_batches
from moh_llm.records.identity import hash_weights
from recount import costs, hashes, intervals, network
from recount.leaves import TIME, Near
from recount.models import CALIBRATION_TOKENS, CONTEXT, HELDOUT_TOKENS, MADE, Model
from recount.text import Row, read_sources, rows_of

EDGES = (0, 512)  # positions at which figures of documents as long as CONTEXT are split


class Recount(Model):
    """A model and what is computed of it for several records, when it is first asked for."""

    @cached_property
    def sources(self) -> list[TokenizedSource]:
        return read_sources(self.mixture, self.base)

    @cached_property
    def base_network(self) -> torch.nn.Module:
        return network.load(self.base)

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.read("moh", "config.json")

    @cached_property
    def proof_text(self) -> list[Row]:
        """Held-out text of the conversion."""
        return rows_of(validation_batches(self.sources, CONTEXT, HELDOUT_TOKENS, 1))

    @cached_property
    def proof(self) -> network.Comparison:
        """The converted model beside its base on these."""
        return network.compare(network.load(self.converted), self.base_network, self.proof_text)


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
    """The figures of `conversion.json`."""
    return {
        "base": {"dense_sha256": hash_weights(recount.base).dense},
        "plan": _plan(recount),
        "calibration": _calibration(recount.sources),
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
    active = costs.per_layer(recount.config, "num_active_heads")
    assert sum(active) == MADE[recount.kind].options["num_active_heads"] * len(active)
    return {
        "context": CONTEXT,
        "keys_read": Near(costs.keys_read(recount.config, CONTEXT), 5e-5),
    }


def _calibration(sources: list[TokenizedSource]) -> dict[str, Any]:
    """Of each source's training text the first windows, as many as its share, and one at least."""
    read = {}
    for source in sources:
        windows = max(1, round(CALIBRATION_TOKENS * source.weight / CONTEXT))
        read[source.name] = CONTEXT * min(windows, len(source.train) // CONTEXT)
    return {"tokens": sum(read.values()), "tokens_of_source": read}


def _verification(recount: Recount) -> dict[str, Any]:
    found = recount.proof
    return {
        "all_heads_active": {"equals_base": _is_base(recount), "tokens": CONTEXT * _rows_at_once(recount)},
        "held_out_tokens": int(found.sums[:, 0].sum()),
        "held_out_documents": len(found.sums),
        "base_perplexity": math.exp(found.means[2]),
        "converted": figures(found),
        "heads_read": Near(heads_read(found.passes), 2e-4),
        "keys_read": Near(keys_read(recount.config, found.passes), 2e-4),
        "by_position": _by_position(found),
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


def heads_read(passes: list[network.Pass]) -> float:
    """Heads that a token has on, mean over layers."""
    loads = network.head_load(passes)
    return sum(map(sum, loads)) / len(loads)


def keys_read(config: dict[str, Any], passes: list[network.Pass]) -> float:
    """Share of the keys of a sequence whose distant keys are read as often as those of these documents."""
    read = total = 0.0
    for one in passes:
        on, off = costs.keys_of(config, len(one.logits))
        shares = torch.stack(one.gates).double().mean((0, 2)).numpy()
        read, total = read + (shares * (on - off)).sum(), total + (on - off).sum()
    on, off = costs.keys_of(config, CONTEXT)
    return float((off.sum() + read / total * (on - off).sum()) / on.sum())


@torch.no_grad()
def _is_base(recount: Recount) -> bool:
    """Whether with all heads on the converted model's logits are the base's."""
    moh = network.load(recount.converted)
    moh.set_active_heads(8)
    ids = torch.from_numpy(recount.proof_text[0][0][1])[None]
    return torch.equal(moh(ids).logits, recount.base_network(ids).logits)


def expected_lineage(recount: Recount) -> dict[str, Any]:
    """The figures of `lineage.json` of the converted model."""
    base, made = recount.base, recount.converted
    entry = {
        "dense_sha256": hash_weights(base).dense,
        "made": hashes.model_hashes(made),
    }
    return {"entries": [entry]}
