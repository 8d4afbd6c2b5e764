"""What `run.json` of a finished run, and the lineage of the model that it made, should hold."""

import hashlib
from typing import Any

from recount import conversion, hashes, training
from recount.leaves import PLACE, TIME, Exempt, Near
from recount.models import SEQUENCE, STEPS
from recount.text import Source, sequence_of
from recount.training import Run


def expected_run(run: Run) -> dict[str, Any]:
    """The whole of `run.json`."""
    sources = run.sources
    return {
        "status": "finished",
        "config": _config(run.recipe, run.read("run", "run.json")["config"]),
        "model": {"sha256": hashes.model_sha256(run.converted)},
        "data": {source.name: _data(source) for source in sources},
        "mixture": "recounted",
        "reference": "base",
        "steps": STEPS,
        "tokens": STEPS * run.recipe["data"]["batch_size"] * SEQUENCE,
        "seconds": TIME,
        "data_read": receipt(run),
        "tokens_in": PLACE,
        "device": PLACE,
        "device_name": PLACE,
        "compute_dtype": "float32",
        "processes": 1,
        "parameters": parameters(run),
        "balance_coefficient": training.BETAS[run.kind],
        "versions": PLACE,
        "evaluation": run.saved,
        "made": hashes.model_hashes(run.tuned),
        "model_files": {name: file for name, file in hashes.files_of(run.tuned).items() if name != "README.md"},
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


def receipt(run: Run) -> dict[str, Any]:
    """Of each source what the run has read."""
    size = run.recipe["data"]["batch_size"]
    taken = [sequence_of(run.sources, number, SEQUENCE, 0)[0] for number in range(STEPS * size)]
    found = {}
    for source in run.sources:
        count, has = taken.count(source.name), len(source.train) // SEQUENCE
        found[source.name] = {
            "weight": Near(source.share, 6e-7),
            "tokens": count * SEQUENCE,
            "share": Near(count / len(taken), 6e-7),
            "epochs": Near(count / has, 6e-5),
            "repeated_tokens": max(0, count - has) * SEQUENCE,
        }
    return found


def expected_lineage(run: Run) -> dict[str, Any]:
    """The whole of the tuned model's `lineage.json`."""
    recipe = run.recipe
    objective = recipe.get("objective", {}).get("kind", "distillation")
    entry = {
        "kind": "run",
        "objective": objective,
        "tokens": STEPS * recipe["data"]["batch_size"] * SEQUENCE,
        "steps": STEPS,
        "mixture": "recounted",
        "seed": 0,
        "teacher": "base" if objective == "distillation" else None,
        "lora_rank": None,
        "freeze_base": recipe.get("freeze_base", False),
        "began_with": hashes.model_hashes(run.converted),
        "made": hashes.model_hashes(run.tuned),
    }
    return {"entries": [*conversion.expected_lineage(run)["entries"], entry]}


def _config(asked: Any, recorded: Any) -> Any:
    """What was asked for; keys that were not have a default, which is a setting and no figure."""
    if not isinstance(asked, dict):
        return asked
    defaults = {name: Exempt("a default of the recipe") for name in recorded}
    return defaults | {name: _config(value, recorded[name]) for name, value in asked.items()}


def _data(source: Source) -> dict[str, Any]:
    shards = [hashlib.sha256(split.row.ids.astype("<u2").tobytes()) for split in (source.train, source.held_out)]
    return {
        "weight": source.share,
        "tokens": len(source.train),
        "held_out_tokens": len(source.held_out),
        "sha256": hashlib.sha256("".join(shard.hexdigest() for shard in shards).encode()).hexdigest(),
    }
