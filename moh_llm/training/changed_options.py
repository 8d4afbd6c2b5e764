"""Which options may change when a run is resumed, and which ones were removed."""

from typing import Any

_READERS = "a thread reads the next batch while one is trained on"
_JUMPS = "a step counts as diverged where loss or gradient is not finite; optimizer.max_grad_norm bounds what others do"
# Options of earlier versions, with what does their work now. A recipe that has one is refused.
REMOVED = {
    "data.dataloader_num_workers": _READERS,
    "data.num_workers": _READERS,
    "divergence.most_in_a_row": "5 dropped steps in a row end the run",
    "divergence.spike_factor": _JUMPS,
    "divergence.window": _JUMPS,
    "evaluation.batch_size": "held-out text is scored in batches of data.micro_batch_size sequences",
    "gradient_checkpointing_every": "gradient_checkpointing recomputes every layer",
    "hub.licence": "the licence on record is taken; moh-llm publish --licence names one that is not",
    "hub.milestones": "`moh-llm checkpoint export` makes a model of a checkpoint, and `moh-llm publish` publishes it",
    "hub.private": "create the repository as private on the Hub before the run; one that exists stays as it is",
    "optimizer.epsilon": "AdamW has PyTorch's, 1e-8",
    "schedule.start_learning_rate": "warm-up rises from 1e-5",
    "save_dtype": "weights are saved in the dtype of model, which moh-llm convert --dtype chooses",
}
# Of these the ones that shape the training curve, with the value that runs have now: a run that was recorded with
# another value cannot go on. The record of a run may have all others.
_VALUES_NOW = {"divergence.spike_factor": None, "optimizer.epsilon": 1e-8, "schedule.start_learning_rate": 1e-5}
# Places, and the group that publishes a finished run. The run record holds hashes of what `model`, `base` and the
# mixture name, and those are compared.
_PLACES = {"model", "output_dir", "base", "hub", "data.mixture"}
# Options (or groups) whose change leaves every number of the training curve as it was: what is kept, what is looked
# at, and recomputation, which repeats the same operations.
_HARMLESS = {
    "gradient_checkpointing",
    "activation_offloading",
    "checkpoint",
    "report_to",
    "attn_implementation",
    "evaluation.eval_steps",
}
# Options of later versions, and what runs did before they were there. A switch was off.
_BEFORE = {"gate_gradient": "exact"}


def changed_options(recorded: dict[str, Any], current: dict[str, Any], finished: bool = False) -> list[str]:
    """Dotted options whose values differ between two recipes (nested dicts) and may not change on resume.

    Args:
        recorded: one recipe.
        current: the other.
        finished: whether the run of ``recorded`` is finished. Options that do not change the training curve
            (``gradient_checkpointing``, say) then matter, too, since they would have no effect.
    """
    left_out = _PLACES | (REMOVED.keys() - _VALUES_NOW.keys())
    return _differing(recorded, current, left_out if finished else left_out | _HARMLESS, "")


def without_removed(recorded: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The recipe of a record without the options that were removed."""
    return {
        name: without_removed(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in recorded.items()
        if prefix + name not in REMOVED
    }


def _differing(recorded: dict[str, Any], current: dict[str, Any], left_out: set[str], prefix: str) -> list[str]:
    changed = []
    for name in sorted(recorded.keys() | current.keys()):
        now = _VALUES_NOW.get(prefix + name)
        old, new = recorded.get(name, now), current.get(name, now)
        later = name not in recorded and new == _BEFORE.get(prefix + name, False)
        if prefix + name in left_out or old == new or later:
            continue
        nested = isinstance(old, dict) and isinstance(new, dict)
        changed += _differing(old, new, left_out, f"{prefix}{name}.") if nested else [prefix + name]
    return changed
