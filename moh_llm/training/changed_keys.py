"""Which keys of a recipe may change when a run is resumed, and which ones are gone."""

from typing import Any

_READERS = "a thread reads the next batch while one is trained on"
_JUMPS = "a step counts as diverged where loss or gradient is not finite; optimizer.max_grad_norm bounds what others do"
# Keys of earlier recipes that are gone, with the value that runs now have and what does the key's work. A recipe that
# has one is refused. The record of a run may have it: that run goes on unless the value would change its curve.
GONE: dict[str, tuple[Any, str]] = {
    "data.dataloader_num_workers": (None, _READERS),
    "data.num_workers": (None, _READERS),
    "divergence.most_in_a_row": (None, "5 dropped steps in a row end the run"),
    "divergence.spike_factor": (None, _JUMPS),
    "divergence.window": (None, _JUMPS),
    "evaluation.batch_size": (None, "held-out text is scored in batches of data.micro_batch_size sequences"),
    "gradient_checkpointing_every": (1, "gradient_checkpointing recomputes every layer"),
    "hub.licence": (None, "the licence on record is taken; moh-llm publish --licence names one that is not"),
    "hub.private": (None, "create the repository as private on the Hub before the run; one that exists stays as it is"),
    "optimizer.epsilon": (1e-8, "AdamW has PyTorch's, 1e-8"),
    "schedule.start_learning_rate": (1e-5, "warm-up rises from 1e-5"),
    "save_dtype": (None, "weights are saved in the dtype of model, which moh-llm convert --dtype chooses"),
}
# Keys that name places, and the group that publishes a finished run. The run record holds hashes of what `model`,
# `base` and the mixture name, and those are compared.
_PLACES = {"model", "output_dir", "base", "hub", "data.mixture"}
# Keys (or groups) whose change leaves every number of the training curve as it was: what is kept, what is only looked
# at, and recomputation, which repeats the same operations.
_HARMLESS = {
    "save_dtype",
    "gradient_checkpointing",
    "gradient_checkpointing_every",
    "activation_offloading",
    "checkpoint",
    "report_to",
    "attn_implementation",
    "evaluation.eval_steps",
    "evaluation.batch_size",
    "data.dataloader_num_workers",
    "data.num_workers",
    "divergence.most_in_a_row",
    "divergence.window",
}
# Keys of later versions, and what runs did before they were there. A switch was off.
_BEFORE = {"gate_gradient": "exact"}


def changed_keys(recorded: dict[str, Any], current: dict[str, Any], finished: bool = False) -> list[str]:
    """Dotted keys whose values differ between two recipes (nested dicts) and may not change on resume.

    Args:
        recorded: one recipe.
        current: the other.
        finished: whether the run of ``recorded`` is finished. Keys that do not change the training curve
            (``gradient_checkpointing``, say) then matter, too, since they would have no effect.
    """
    left_out = _HARMLESS & GONE.keys() if finished else _HARMLESS
    return _differing(recorded, current, _PLACES | left_out, "")


def without_gone_keys(recorded: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The recipe of a record without the keys that are gone."""
    return {
        name: without_gone_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in recorded.items()
        if prefix + name not in GONE
    }


def _differing(recorded: dict[str, Any], current: dict[str, Any], left_out: set[str], prefix: str) -> list[str]:
    changed = []
    for name in sorted(recorded.keys() | current.keys()):
        now, _ = GONE.get(prefix + name, (None, ""))
        old, new = recorded.get(name, now), current.get(name, now)
        later = name not in recorded and new == _BEFORE.get(prefix + name, False)
        if prefix + name in left_out or old == new or later:
            continue
        nested = isinstance(old, dict) and isinstance(new, dict)
        changed += _differing(old, new, left_out, f"{prefix}{name}.") if nested else [prefix + name]
    return changed
