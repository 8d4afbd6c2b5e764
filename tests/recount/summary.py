"""What a report says of the training run behind a model, from what the run's log and record should hold."""

from typing import Any

from recount.leaves import TIME, Exempt
from recount.models import SEQUENCE, STEPS
from recount.training import Run


def expected(run: Run) -> dict[str, Any]:
    """The report's `training`."""
    return {
        "runs": [_run(run)],
        "groups": {"run": ["run"]},
        "differences": {},
        "comparison": [],
        "command": Exempt("the command line"),
    }


def _run(run: Run) -> dict[str, Any]:
    losses = [(line["loss"], line["step"]) for line in run.log if "loss" in line]
    lowest = min(losses, key=lambda pair: pair[0].value)
    marks = {"first": losses[0], "last": losses[-1], "lowest": lowest}
    return {
        "name": "run",
        "folder": str(run.run),
        "status": "finished",
        "seed": 0,
        "steps": STEPS,
        "tokens": STEPS * run.recipe["data"]["batch_size"] * SEQUENCE,
        "seconds": TIME,
        "tokens_per_second": TIME,
        "loss": {name: {"step": step, "loss": loss} for name, (loss, step) in marks.items()},
        "dropped": {},
        "scores": [
            {"tokens": 0, **line, "ratio": _ratio(line["validation"])} for line in run.log if "validation" in line
        ],
        "saved_model": {**run.saved, "ratio": _ratio(run.saved)},
    }


def _ratio(scores: dict[str, Any]) -> Any:
    other = scores.get("reference_perplexity")
    return scores["perplexity"] / other if other else None
