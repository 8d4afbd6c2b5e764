"""What a report says of the training run behind a model, from what the run's log and record should hold."""

from typing import Any

from recount import run_record
from recount.leaves import PLACE, TIME, Exempt, Near
from recount.models import SEQUENCE, STEPS
from recount.training import Run


def expected(run: Run) -> dict[str, Any]:
    """The report's `training`."""
    return {
        "runs": [_run(run)],
        "groups": [{"name": "run", "runs": ["run"], "seeds": [0]}],
        "reference": "the base",
        "same_held_out_text": True,
        "differences": {},
        "comparison": [],
        "versions": PLACE,
        "command": Exempt("the command line"),
        "created": PLACE,
    }


def _run(run: Run) -> dict[str, Any]:
    recipe, model = run.recipe, run.recount.model
    objective = {"kind": "distillation", "temperature": 1.0, "balance_coefficient": None, "layer_coefficient": 0.0}
    losses = [(line["loss"], line["step"]) for line in run.log if "loss" in line]
    lowest = min(losses, key=lambda pair: pair[0].value)
    marks = {"first": losses[0], "last": losses[-1], "lowest": lowest}
    tokens = STEPS * recipe["data"]["batch_size"] * SEQUENCE
    saved = _score(run.saved) | {"all_heads_kl": run.saved["all_heads"]["kl"], "dtype": "float32"}
    return {
        "name": "run",
        "folder": str(model.run),
        "status": "finished",
        "model": str(model.converted),
        "mixture": str(model.mixture),
        "objective": objective | recipe.get("objective", {}),
        "reference": "the base",
        "floor": None if run.kind == "paper" else Near(0.0, 1e-6),
        "lora": None,
        "seed": 0,
        "device": PLACE,
        "device_name": PLACE,
        "compute_dtype": "float32",
        "processes": 1,
        "parameters": run_record.parameters(run),
        "steps": STEPS,
        "max_steps": STEPS,
        "tokens": tokens,
        "seconds": TIME,
        "tokens_per_second": TIME,
        "loss": {name: {"step": step, "loss": loss} for name, (loss, step) in marks.items()},
        "dropped": [],
        "scores": [_of_line(line) for line in run.log if "validation" in line],
        "saved_model": {"step": STEPS, "tokens": tokens, **saved},
        "last_log_line_cut": False,
    }


def _of_line(line: dict[str, Any]) -> dict[str, Any]:
    """A score on held-out text, and the routers' health in numbers over layers."""
    routing = line["routing"]
    entropies = [value for value in routing["entropy"] if value is not None]
    changed = [value.value for value in routing["changed"] or [] if value is not None]
    health = {
        "dead_heads": sum(routing["dead_heads"]),
        "routed_heads": sum(map(len, routing["load"])),
        "lowest_entropy": min(entropies, key=lambda value: value.value) if entropies else None,
        "changed": Near(sum(changed) / len(changed), 1e-6) if changed else None,
        "heads_read": routing["heads_read"],
    }
    return {"step": line["step"], "tokens": line.get("tokens", 0), **_score(line["validation"]), "routing": health}


def _score(found: dict[str, Any]) -> dict[str, Any]:
    other = found.get("reference_perplexity")
    names = ("reference_perplexity", "ratio_interval", "kl", "kl_interval", "top1_agreement")
    return {
        "held_out_tokens": found["tokens"],
        "held_out_documents": found["documents"],
        "perplexity": found["perplexity"],
        "ratio": found["perplexity"] / other if other else None,
        **{name: found.get(name) for name in names},
    }
