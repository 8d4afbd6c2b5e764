"""What a run begins with: the weights of its model, their lineage, and the reference.

The reference is the teacher in distillation, and every ratio and KL of the run compares with it. It is the base, the
checkpoint that the model's conversion names. Only where the base is not available it is the model that the run began
with, all heads on; then no figure of the run mentions the base.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator

from moh_llm.conversion.base import BaseCheckpoint, open_base
from moh_llm.errors import UserError
from moh_llm.reading import expand_home, read_json
from moh_llm.records.conversion import (
    REFERENCES,
    Base,
    Chain,
    ReferenceKind,
    RunEntry,
    mixture_name,
    read_chain,
    read_conversion,
)
from moh_llm.records.identity import FolderRecords, hash_model, read_records
from moh_llm.records.seal import WeightHashes
from moh_llm.training.config import TrainConfig
from moh_llm.training.parallel import from_main


@dataclass(frozen=True)
class Reference:
    """The model that a run is compared with.

    Attributes:
        kind: "base", the checkpoint that the conversion names, or "start", the model the run began with, all heads on.
        own: whether it needs no other weights: it is the model that the run began with, or that model's dense weights
            have the hash that the conversion recorded of the base.
        base: the base's files, unless it is ``own``.
        source: where it comes from, or why it is not the base, for the user.
    """

    kind: ReferenceKind
    own: bool
    base: BaseCheckpoint | None = None
    source: str = ""

    @property
    def described(self) -> str:
        """The reference and its origin, for the user."""
        return REFERENCES[self.kind] + (self.source and f", {self.source}")


@dataclass(frozen=True)
class StartingPoint:
    """What a run begins with.

    Attributes:
        records: the model's hashes, its lineage, and its conversion.
        reference: None where there is nothing to compare with: a model from scratch, or a model with weighted scores,
            which is not its dense form with all heads on.
        mixture: the name of the text's mixture, or of the place of images; None: unknown, and the file or folder names
            it.
    """

    records: FolderRecords
    reference: Reference | None
    mixture: str | None = None

    def check_model(self, config: TrainConfig) -> None:
        """Raise UserError where ``config.model`` has changed: weights that are not trained are read from it again."""
        if part := self.records.model.difference(hash_model(Path(config.model))):
            raise UserError(
                f"model={config.model} has {part} other than when the run began; put it back and give the same "
                "command again"
            )

    def chain_after(self, config: TrainConfig, steps: int, made: WeightHashes) -> Chain:
        """The lineage of the model ``made`` after ``steps`` steps."""
        taught = self.reference if config.objective.has_teacher else None
        return self.records.chain.with_entry(
            RunEntry(
                kind="run",
                objective=config.objective.kind,
                tokens=steps * config.step_size[0],
                steps=steps,
                mixture=mixture_name(self.mixture, config.data.mixture),
                seed=config.seed,
                teacher=taught.kind if taught else None,
                lora_rank=config.lora.rank if config.lora else None,
                freeze_base=config.freeze_base,
                began_with=self.records.model,
                made=made,
            )
        )


def find_starting_point(config: TrainConfig, recorded: ReferenceKind | None = None) -> StartingPoint:
    """Hash the model that the run begins with, read its records, and find its reference.

    A resumed run keeps the kind of reference that it began with, ``recorded``.

    Raises:
        UserError: ``config.base`` is not the checkpoint that the conversion names, or has changed since; the run was
            begun with another reference than can be had now; a record is malformed.
    """
    records = read_records(Path(config.model))
    return StartingPoint(records, _find_reference(config, records, recorded))


def expected_reference(config: TrainConfig) -> Reference | None:
    """What `find_starting_point` finds if the weights are those of the lineage; they are not read."""
    folder = Path(config.model)
    chain = read_chain(folder)
    weights = chain.entries[-1].made if chain.entries else WeightHashes(dense="", routing="")
    return _find_reference(config, FolderRecords(weights, read_conversion(folder), chain))


def agreed_starting_point(
    config: TrainConfig, accelerator: Accelerator, recorded: ReferenceKind | None = None
) -> StartingPoint:
    """`find_starting_point` on the main process, for all processes, so that all have the same reference.

    Each process looks for the base's files itself: they may lie elsewhere on another machine.
    """
    starting_point = from_main(accelerator, lambda: find_starting_point(config, recorded))
    reference = starting_point.reference
    if reference is not None and reference.base is not None and not accelerator.is_main_process:
        base = open_base(reference.base.name, reference.base.revision)
        starting_point = replace(starting_point, reference=replace(reference, base=base))
    return starting_point


def _find_reference(
    config: TrainConfig, records: FolderRecords, recorded: ReferenceKind | None = None
) -> Reference | None:
    """The reference of a run that begins with the model of these records."""
    conversion, changed = records.conversion, records.changed
    weighted = read_json(Path(config.model) / "config.json").get("router_score", "quantized") != "quantized"
    if conversion is None:
        if config.base is not None:
            raise UserError(
                f"base={config.base}: model={config.model} holds no record of a conversion that names a base"
                + (f" ({changed}); restore it" if changed else "; drop base")
            )
        return Reference("start", own=True) if config.objective.has_teacher and not weighted else None
    given = None
    if config.base is not None:
        given = open_base(config.base)
        if given.dense_sha256 != conversion.base.dense_sha256:
            raise UserError(
                f"base={config.base} holds other weights than the checkpoint that model={config.model} was converted "
                f"from, {conversion.base.label}; name that one, or drop base"
            )
        if recorded == "start":
            raise UserError(
                f"base={config.base}: the run in output_dir={config.output_dir} was begun without its base, against "
                f"{REFERENCES['start']}; drop base, or pass --overwrite to start anew"
            )
    if weighted:
        return None
    base, label = conversion.base, conversion.base.label
    if recorded == "start":
        return Reference("start", own=True, source="as when the run was begun")
    added = conversion.vocabulary
    if records.model.dense == (added.dense_sha256 if added else base.dense_sha256):
        wider = f" with {added.new_tokens:,} more tokens" if added else ""
        return Reference("base", own=True, source=f"{label}{wider}, whose dense weights it has")
    if added:
        if given is not None:
            raise UserError(
                f"base={config.base} has no rows for {added.new_tokens:,} tokens of model={config.model}, so it cannot "
                "teach it; drop base"
            )
        source = f"since {label} has no rows for {added.new_tokens:,} of its tokens"
        return Reference("start", own=True, source=source)
    try:
        found = given or _open_named(base)
    except UserError as error:
        if recorded == "base":
            raise UserError(
                f"the run in output_dir={config.output_dir} was begun against the base, and now {error}; name its "
                "place with --base, or pass --overwrite to start anew"
            ) from error
        source = f"since {error} (`moh-llm train --help` says how to name its new place)"
        return Reference("start", own=True, source=source)
    return Reference("base", own=False, base=found, source=f"{label}, from {found.name}")


def _open_named(recorded: Base) -> BaseCheckpoint:
    """The checkpoint where the conversion found it. Raises UserError unless it is still there."""
    if recorded.revision is None and not Path(expand_home(recorded.name)).is_dir():
        raise UserError(f"the checkpoint it was converted from is not at {recorded.name}")
    found = open_base(recorded.name, recorded.revision)
    if found.dense_sha256 != recorded.dense_sha256:
        raise UserError(f"{recorded.name} holds other weights than those it was converted from")
    return found
