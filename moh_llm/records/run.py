"""The records of a training run: `run.json`, a line of `log.jsonl`, and `checkpoint.json`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from moh_llm.errors import UserError
from moh_llm.reading import parse_json
from moh_llm.records.base import Record
from moh_llm.records.conversion import ReferenceKind
from moh_llm.records.seal import FileMark, WeightHashes


class ModelMark(Record):
    """What identifies the model that a run began with."""

    sha256: str


class Scores(Record):
    """Scores on held-out text. Scores against the reference are None where there is none.

    Attributes:
        tokens, documents: numbers of predicted tokens and of their documents.
        reference: which model the reference is.
        kl: KL to the reference in nats per token.
        ratio_interval, kl_interval: 95 % intervals over documents (`moh_llm.intervals`); None below 5 documents.
        top1_agreement: share of tokens whose most likely prediction is the reference's.
        keys_read: threshold routers: share of the keys that the model reads in a document of the recipe's length.
        dtype, heads_read, all_heads_kl: of the saved model alone: the dtype of both models, the heads that a token has
            on, mean over layers and tokens, and the KL with all heads on (how far training moved the dense weights).
    """

    tokens: int
    documents: int
    perplexity: float
    reference: ReferenceKind | None = None
    reference_perplexity: float | None = None
    ratio_interval: list[float] | None = None
    kl: float | None = None
    kl_interval: list[float] | None = None
    top1_agreement: float | None = None
    keys_read: float | None = None
    dtype: str | None = None
    heads_read: float | None = None
    all_heads_kl: float | None = None

    @property
    def ratio(self) -> float | None:
        """Perplexity divided by the reference's."""
        return self.perplexity / self.reference_perplexity if self.reference_perplexity else None


class Routing(Record):
    """Router statistics by layer, over all tokens of the held-out text.

    A layer in which the same heads are on for all tokens has an empty `load`.

    Attributes:
        load: share of tokens whose scores select each routed head.
        dead_heads: number of heads of `load` that no token selects.
        heads_read: heads that a token has on, mean over layers and tokens.
    """

    load: list[list[float]]
    dead_heads: list[int]
    heads_read: float | None = None


class Timing(Record):
    """How long a step took, and the tokens or images that it read per second."""

    seconds: float
    tokens_per_second: float | None = None
    images_per_second: float | None = None


class RunRecord(Record):
    """`OUTPUT/run.json`.

    Attributes:
        status: ``finished`` only when ``model_files`` were read back from disk.
        config: the recipe.
        model: the model that the run began with.
        tracked_as: name of the run's curves in W&B and trackio, which no other run has.
        data: what identifies the tokens; ``mixture``: the name of their mixture; ``tokens_in``: their folder.
        reference: the model that the run is compared with, if any.
        seconds: how long a finished run trained.
        data_read: the receipt of what was read, by source.
        parameters: numbers of weights: ``total``, ``trained``, and ``trained_`` of base, adapters, routers, fallbacks.
        balance_coefficient: weight of the load-balance loss; None where the model's routers have no such loss.
        keys_asked, keys_calibrated: threshold routers: share of the keys that the model should read in a document of
            the recipe's length, and that it reads in the training text.
        evaluation: scores of the saved model; ``held_out``: those of a model of images.
        model_files: the files of ``OUTPUT/model`` by name, without its seal.
        made: hashes of the saved model.
    """

    status: Literal["new", "running", "finished"]
    config: dict[str, Any]
    model: ModelMark
    tracked_as: str | None = None
    data: dict[str, Any] | None = None
    mixture: str | None = None
    reference: ReferenceKind | None = None
    seconds: float | None = None
    data_read: dict[str, Any] | None = None
    tokens_in: str | None = None
    device: str | None = None
    device_name: str | None = None
    compute_dtype: str | None = None
    processes: int | None = None
    parameters: dict[str, int] | None = None
    balance_coefficient: float | None = None
    versions: dict[str, str] | None = None
    keys_asked: float | None = None
    keys_calibrated: float | None = None
    evaluation: Scores | None = None
    held_out: dict[str, int | float] | None = None
    model_files: dict[str, FileMark] | None = None
    made: WeightHashes | None = None


class LogLine(Record):
    """A line of `OUTPUT/log.jsonl`: a step, or the scores before the first one (step 0, without a loss).

    Other losses, learning rates and the gradient's norm are further numbers of a step; None where they are not finite.

    Attributes:
        heads_read: heads that were on per token, mean over layers.
        keys_read: share of the base's keys that the model reads in a document of the recipe's length.
        keys_multiplier: weight of the distant keys that are read in the loss.
    """

    step: NonNegativeInt
    tokens: int | None = None
    loss: float | None = None
    dropped: str | None = None
    heads_read: float | None = None
    keys_read: float | None = None
    keys_multiplier: float | None = None
    timing: Timing | None = None
    tokens_of_source: dict[str, int] | None = None
    validation: Scores | None = None
    routing: Routing | None = None


def read_log(path: Path, way_out: str) -> tuple[list[LogLine], bool]:
    """The lines of a log, and whether an incomplete last one, as a kill leaves it, is left out.

    Raises UserError, which ends in ``way_out``, for a malformed line, and OSError where the file cannot be read.
    """
    *texts, rest = path.read_bytes().split(b"\n")
    lines = []
    for number, text in enumerate(texts, start=1):
        where = f"{path}: line {number}"
        try:
            lines += [LogLine.parse(parse_json(text, where), where)] if text.strip() else []
        except UserError as error:
            raise UserError(f"{error}; {way_out}") from error
    return lines, bool(rest.strip())


class CheckpointRecord(Record):
    """`checkpoint.json`.

    Attributes:
        step: steps made.
        updates: steps whose gradient changed the weights.
        seconds: time of training so far.
        data: the receipt of what was read, by source.
        budget: multiplier of the budget of keys, and its average (`moh_llm.training.budget`).
        files: the checkpoint's other files by name.
    """

    step: NonNegativeInt
    updates: NonNegativeInt
    seconds: NonNegativeFloat
    data: dict[str, Any] = Field(default_factory=dict)
    budget: list[float] | None = None
    files: dict[str, FileMark]
