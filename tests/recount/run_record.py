"""What `run.json` of a finished run, and the lineage of the model that it made, should hold."""

from typing import Any

import torch

from moh_llm.data.shards import TokenizedSource
from moh_llm.records.identity import identify
from recount import conversion, hashes, network, training
from recount.leaves import TIME, Exempt, Near
from recount.models import SEQUENCE, STEPS
from recount.training import Run


def expected_run(run: Run) -> dict[str, Any]:
    """The figures of `run.json`."""
    return {
        "config": Exempt("the recipe"),
        "model": {"sha256": identify(str(run.converted)).sha256},
        "data": {source.name: _data(source) for source in run.sources},
        "reference": "base",
        "seconds": TIME,
        "data_read": receipt(run),
        "processes": 1,
        "parameters": parameters(run),
        "balance_coefficient": training.BETAS[run.kind],
        **keys(run),
        "evaluation": run.saved,
        "made": hashes.model_hashes(run.tuned),
        "model_files": Exempt("sizes and hashes of files"),
    }


def parameters(run: Run) -> dict[str, int]:
    """Numbers in the student's weights, and in those that are trained, by kind."""
    folder, kinds = run.converted, {"routers": ".router.", "fallbacks": ".fallback."}

    def count(part: str) -> int:
        return hashes.count(folder, lambda name: part in name and training.is_trained(run, name))

    found = {f"trained_{kind}": count(part) for kind, part in kinds.items()}
    trained = count("")
    base = trained - sum(found.values())
    return {"trained": trained, "total": hashes.count(folder), "trained_base": base, "trained_adapters": 0, **found}


def keys(run: Run) -> dict[str, Near]:
    """The share of keys that was asked for, and that the saved model reads of the text that thresholds were set on."""
    if run.kind != "local":
        return {}
    saved = network.load(run.tuned)
    rows = [row for step in range(1, max(1, STEPS // 4) + 1) for _, row in run.sequences(step)]
    with torch.no_grad():
        passes = [network.run(saved, ids) for row in rows for _, ids in row]
        read, _, total = training.distant_keys(saved.config.to_dict(), passes)
    shares = {"keys_asked": training.planned(run.config), "keys_calibrated": float(read) / total}
    return {name: Near(training.keys_read(run.config, share), 1e-5) for name, share in shares.items()}


def receipt(run: Run) -> dict[str, Any]:
    """Of each source what the run has read."""
    taken = [name for step in range(1, STEPS + 1) for name, _ in run.sequences(step)]
    found = {}
    for source in run.sources:
        count, has = taken.count(source.name), len(source.train) // SEQUENCE
        found[source.name] = {
            "weight": Near(source.weight, 6e-7),
            "tokens": count * SEQUENCE,
            "share": Near(count / len(taken), 6e-7),
            "epochs": Near(count / has, 6e-5),
            "repeated_tokens": max(0, count - has) * SEQUENCE,
        }
    return found


def expected_lineage(run: Run) -> dict[str, Any]:
    """The figures of the tuned model's `lineage.json`."""
    recipe = run.recipe
    entry = {
        "tokens": STEPS * recipe["data"]["batch_size"] * SEQUENCE,
        "steps": STEPS,
        "seed": 0,
        "teacher": "base",
        "freeze_base": recipe.get("freeze_base", False),
        "began_with": hashes.model_hashes(run.converted),
        "made": hashes.model_hashes(run.tuned),
    }
    return {"entries": [*conversion.expected_lineage(run)["entries"], entry]}


def _data(source: TokenizedSource) -> dict[str, Any]:
    tokens = {"tokens": len(source.train), "held_out_tokens": len(source.validation)}
    return {"weight": source.weight, **tokens, "sha256": Exempt("the hash of the shards")}
