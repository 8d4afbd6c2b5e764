"""A claim, and the records of a model that its claims are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import Conversion
from moh_llm.records.evaluation import EvaluationRecord
from moh_llm.records.lineage import Chain
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
        run: ``run.json`` of the training run that wrote it, if that was found; ``log``: the lines of its log.
        evaluation: an evaluation of this model, and of its base if that was scored, and of no other model.
        label: the model's name in it.
    """

    config: MoHLlamaConfig
    conversion: Conversion | None = None
    chain: Chain = field(default_factory=lambda: Chain(entries=[]))
    run: RunRecord | None = None
    log: Sequence[LogLine] = ()
    evaluation: EvaluationRecord | None = None
    label: str = ""
