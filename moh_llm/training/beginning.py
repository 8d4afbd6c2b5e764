"""What a run begins with: the weights of its model, their lineage, and the model that the run is compared with.

That model, the reference, teaches in distillation, and every ratio and KL of the run is against it. It is the base,
the checkpoint that the model's conversion names. Only where that cannot be had it is the model that the run began
with, all heads on; then no figure of the run is called one of the base.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from moh_llm.conversion.base import is_checkpoint, open_base
from moh_llm.errors import UserError
from moh_llm.files import read_json
from moh_llm.records.conversion import Base, Conversion, read_conversion
from moh_llm.records.lineage import (
    REFERENCES,
    Chain,
    ReferenceKind,
    RunEntry,
    WeightHashes,
    hash_weights,
    mixture_name,
    read_chain,
)
from moh_llm.training.config import TrainConfig
from moh_llm.training.parallel import from_main


@dataclass(frozen=True)
class Reference:
    """The model that a run is compared with.

    Attributes:
        kind: "base", the checkpoint that the conversion names, or "start", the model the run began with, all heads on.
        own: whether the model that the run began with computes the same with all heads on: it is that model, or its
            dense weights have the hash that the conversion recorded of the base. It then needs no other weights.
        checkpoint: folder or Hub id to load it from, where it is not ``own``.
        revision: commit on the Hub.
        told: where it comes from, or why it is not the base, for the user to read.
    """

    kind: ReferenceKind
    own: bool
    checkpoint: str | None = None
    revision: str | None = None
    told: str = ""

    def sentence(self, teaches: bool) -> str:
        """What a run says of it."""
        return f"{'teacher' if teaches else 'compared with'}: {REFERENCES[self.kind]}{self.told and f', {self.told}'}"

    def record(self) -> dict[str, Any]:
        """What the run's record keeps."""
        return {"kind": self.kind, "own": self.own, "checkpoint": self.checkpoint, "revision": self.revision}


@dataclass(frozen=True)
class Beginning:
    """What a run begins with.

    Attributes:
        weights: hashes of the model's weights.
        chain: its lineage.
        reference: None where there is nothing to compare with: a model from scratch, or one with weighted scores,
            which with all heads on is not its dense form.
    """

    weights: WeightHashes
    chain: Chain
    reference: Reference | None

    def chain_after(self, config: TrainConfig, steps: int, made: WeightHashes) -> Chain:
        """The lineage of the model that the run has made after so many steps."""
        taught = self.reference if config.objective.kind == "distillation" else None
        return self.chain.with_entry(
            RunEntry(
                kind="run",
                objective=config.objective.kind,
                tokens=steps * config.tokens_per_step,
                steps=steps,
                mixture=mixture_name(config.data.mixture),
                seed=config.seed,
                teacher=taught.kind if taught else None,
                lora_rank=config.lora.rank if config.lora else None,
                began_with=self.weights,
                made=made,
            )
        )


def find_beginning(config: TrainConfig, recorded: dict[str, Any] | None = None) -> Beginning:
    """Read what the run begins with, all its weights among it, and find its reference.

    Args:
        config: the recipe.
        recorded: what `Reference.record` gave when the run was begun: a resumed run keeps its reference.

    Raises:
        UserError: ``config.base`` is not the checkpoint that the conversion names; the run was begun with another
            reference than can be had now; a record is malformed.
    """
    folder = Path(config.model)
    weights, conversion = hash_weights(folder), read_conversion(folder)
    reference = _find_reference(config, conversion, weights, (recorded or {}).get("kind"))
    return Beginning(weights, read_chain(folder), reference)


def agreed_beginning(
    config: TrainConfig, accelerator: Accelerator, recorded: dict[str, Any] | None = None
) -> Beginning:
    """`find_beginning` on the main process; the others take its word, so that none finds another reference."""
    return from_main(accelerator, lambda: find_beginning(config, recorded))


def _find_reference(
    config: TrainConfig, conversion: Conversion | None, weights: WeightHashes, recorded: ReferenceKind | None
) -> Reference | None:
    weighted = read_json(Path(config.model) / "config.json").get("router_score") == "weighted"
    if conversion is None:
        if config.base is not None:
            raise UserError(
                f"base={config.base}: model={config.model} holds no record of a conversion that names a base; drop base"
            )
        compares = config.objective.kind == "distillation" and not weighted
        return Reference("start", own=True) if compares else None
    if config.base is not None:
        _check_given(config, conversion.base)
        if recorded == "start":
            raise UserError(
                f"base={config.base}: the run in output={config.output} was begun without its base, against "
                f"{REFERENCES['start']}; drop base, or pass --overwrite to start anew"
            )
    if weighted:
        return None
    base, label = conversion.base, conversion.base.label
    if recorded == "start":
        return Reference("start", own=True, told="as when the run was begun")
    if weights.dense == base.dense_sha256:
        told = f"{label}; with all heads on the model is it still, by the hash of its dense weights"
        return Reference("base", own=True, told=told)
    if config.base is not None:
        return Reference("base", own=False, checkpoint=config.base, told=f"{label}, from {config.base}")
    try:
        _check_named(base)
    except UserError as error:
        if recorded == "base":
            raise UserError(
                f"the run in output={config.output} was begun against the base, and now {error}; name its place "
                "with --base, or pass --overwrite to start anew"
            ) from error
        told = f"since {error} (`moh-llm train --help` says how to name its new place)"
        return Reference("start", own=True, told=told)
    return Reference("base", own=False, checkpoint=base.name, revision=base.revision, told=f"{label}, from {base.name}")


def _check_given(config: TrainConfig, recorded: Base) -> None:
    found = open_base(str(config.base))
    if not is_checkpoint(found, recorded):
        raise UserError(
            f"base={config.base} holds other weights than the checkpoint that model={config.model} was converted "
            f"from, {recorded.label} (fingerprint {str(recorded.fingerprint)[:12]}, this one's is "
            f"{found.fingerprint[:12]}); name that one, or drop base"
        )


def _check_named(recorded: Base) -> None:
    """Raise UserError unless the checkpoint lies where the conversion found it."""
    if recorded.revision is None and not Path(recorded.name).expanduser().is_dir():
        raise UserError(f"the checkpoint it was converted from is not at {recorded.name}")
    if not is_checkpoint(open_base(recorded.name, recorded.revision), recorded):
        raise UserError(f"{recorded.name} holds other weights than those it was converted from")
