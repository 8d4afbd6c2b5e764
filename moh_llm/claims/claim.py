"""A claim, and the records of a model that its claims are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import Conversion
from moh_llm.records.evaluation import EvaluationRecord
from moh_llm.records.lineage import Chain, ConversionEntry, ReferenceKind
from moh_llm.records.run import LogLine, RunRecord


@dataclass(frozen=True)
class Claim:
    """A sentence about a model, or a few that belong together.

    Attributes:
        name: that of the function that makes it.
        figures: what it states, unrounded, by path from `ModelRecords` or from the record that the function is given,
            such as "conversion.verification.heads_read".
        text: plain text; whoever prints it escapes it.
    """

    name: str
    figures: Mapping[str, object]
    text: str


@dataclass(frozen=True)
class ModelRecords:
    """The records of one model.

    Attributes:
        config: the model's.
        conversion: its ``conversion.json``.
        chain: its ``lineage.json``.
        run: ``run.json`` of the training run that wrote it, if that was found.
        log: the lines of its log.
        recipe: its recipe with all keys.
        evaluation: an evaluation of this model, and of its base if that was scored, and of no other model.
        label: the model's name in it.
        changed: why the records were not of the model; then none but the conversion's base is kept of them.
    """

    config: MoHLlamaConfig
    conversion: Conversion | None = None
    chain: Chain = field(default_factory=lambda: Chain(entries=[]))
    run: RunRecord | None = None
    log: Sequence[LogLine] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    evaluation: EvaluationRecord | None = None
    label: str = ""
    changed: str | None = None

    @property
    def from_scratch(self) -> bool:
        """Whether the model was trained with cross-entropy and has no conversion; False without a run."""
        return self.conversion is None and self.run is not None and self.recipe["objective"]["kind"] == "cross_entropy"

    @property
    def trained_since(self) -> bool:
        """Whether the records name a training run after the (last) conversion."""
        return self.run is not None or (
            bool(self.chain.entries) and not isinstance(self.chain.entries[-1], ConversionEntry)
        )

    @property
    def reference(self) -> ReferenceKind:
        """What the run's ratios and KLs are against: the base only where that is on record."""
        return "start" if self.run is None or self.run.reference is None else self.run.reference.kind

    @property
    def dense_of_base(self) -> bool:
        """Whether the dense weights are on record as those of the base that the conversion names, by their SHA-256."""
        conversion, entries = self.conversion, self.chain.entries
        made = entries[-1].made if entries else conversion and conversion.made
        return bool(conversion and made) and conversion.base.dense_sha256 == made.dense

    @property
    def dense_kept(self) -> bool | None:
        """Whether the dense weights are those that the conversion wrote, by their SHA-256; None: not on record."""
        entries = self.chain.entries
        made = [entry.made.dense for entry in entries if isinstance(entry, ConversionEntry)]
        return entries[-1].made.dense == made[-1] if made else None
