"""The records of a training run: `run.json`, a line of `log.jsonl`, and `checkpoint.json`."""

from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from moh_llm.records.base import Record
from moh_llm.records.conversion import ReferenceKind
from moh_llm.records.seal import FileMark, WeightHashes


class ModelMark(Record):
    """What identifies the model that a run began with."""

    sha256: str


class ReferenceMark(Record):
    """What a run is compared with (`moh_llm.training.reference.Reference`)."""

    kind: ReferenceKind
    own: bool | None = None
    base: dict[str, Any] | None = None


class DenseScores(Record):
    """Scores of the model with all heads on: how far training moved its dense part from the reference."""

    perplexity: float
    kl: float
    kl_interval: list[float] | None
    top1_agreement: float


class Scores(Record):
    """Scores on held-out text; those against the reference only where there is one.

    Attributes:
        tokens, documents: predicted tokens, and the documents that they are of.
        perplexity, reference_perplexity: the model's and the reference's.
        reference: which model the reference is.
        kl: KL to the reference in nats per token.
        ratio_interval, kl_interval: 95 % intervals over documents (`moh_llm.intervals`); None for fewer than 5.
        top1_agreement: share of tokens whose most likely prediction is the reference's.
        floor: KL of the untrained model with all heads on.
        dtype: that both were scored in, of the saved model.
        all_heads: of the saved model.
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
    floor: float | None = None
    dtype: str | None = None
    all_heads: DenseScores | None = None

    @property
    def ratio(self) -> float | None:
        """Perplexity divided by the reference's."""
        return self.perplexity / self.reference_perplexity if self.reference_perplexity else None


class Routing(Record):
    """Router statistics on all tokens of the held-out text, by layer.

    Attributes:
        load: share of tokens that select each routed head, by its score: tokens that have all heads on, too; empty for
            a layer in which none chooses, since the same heads are on for all tokens.
        entropy: of the mean softmax score, over its maximum; None below two routed groups, or where none chooses.
        dead_heads: how many heads no token selects, of those of `load`.
        changed: share of tokens with other heads than when training began, of those that have not all heads on anyway;
            None for a layer in which none chooses; None before a step was made.
        heads_read: how many heads a token has on, mean over layers; first tokens that have all on are counted.
    """

    load: list[list[float]]
    entropy: list[float | None]
    dead_heads: list[int]
    changed: list[float | None] | None
    heads_read: float | None = None

    @property
    def tokens_with_other_heads(self) -> float | None:
        """`changed`, mean over the layers in which tokens choose."""
        pairs = zip(self.changed or [], self.load, strict=False)
        shares = [share for share, load in pairs if load and share is not None]
        return sum(shares) / len(shares) if shares else None


class Timing(Record):
    """How long a step took; ``mfu`` is the share of the devices' peak FLOP/s, where that is known."""

    seconds: float
    tokens_per_second: float
    mfu: float | None = None


class RunRecord(Record):
    """`OUTPUT/run.json`.

    Attributes:
        status: ``finished`` only when ``model_files`` were read back from disk.
        config: the recipe.
        model: what the run began with.
        data: what identifies the tokens, once they were opened.
        mixture: the name of their mixture; null in records without it.
        reference: what its figures are against; null where there is nothing.
        steps, tokens, seconds: what was trained, of a finished run.
        data_read: the receipt of what was read, by source.
        tokens_in: the folder of the tokens, on the machine that trained.
        device, device_name, compute_dtype, processes, versions: what trained, on what, with what.
        attention_backend: which of `moh_llm.attention` a layer with heads off takes on that device, without gradients.
        parameters: how many numbers the student has (``total``) and how many are trained: all, and of the base, of
            adapters, of routers and of fallbacks.
        balance_coefficient: weight of the load-balance loss; None where the model's routers have no such loss.
        evaluation: scores of the saved model.
        model_files: the files of ``OUTPUT/model`` by name, of a finished run; its seal is not among them.
        made: the model that the run made, which the scores are of.
    """

    status: Literal["new", "running", "finished"]
    config: dict[str, Any]
    model: ModelMark
    data: dict[str, Any] | None = None
    mixture: str | None = None
    reference: ReferenceMark | None = None
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    data_read: dict[str, Any] | None = None
    tokens_in: str | None = None
    device: str | None = None
    device_name: str | None = None
    compute_dtype: str | None = None
    attention_backend: str | None = None
    processes: int | None = None
    parameters: dict[str, int] | None = None
    balance_coefficient: float | None = None
    versions: dict[str, str] | None = None
    evaluation: Scores | None = None
    model_files: dict[str, FileMark] | None = None
    made: WeightHashes | None = None


class LogLine(Record):
    """A line of `OUTPUT/log.jsonl`: a step, or the scores before the first one (step 0, without a loss).

    Losses, rates and the gradient's norm are further numbers of a step; None where they are not finite.

    Attributes:
        heads_asked: heads per token that the step's budgets ask for, mean over layers.
        heads_read: heads that a token of the step had on, mean over layers.
    """

    step: int = Field(ge=0)
    tokens: int | None = None
    loss: float | None = None
    dropped: str | None = None
    heads_asked: float | None = None
    heads_read: float | None = None
    timing: Timing | None = None
    tokens_of_source: dict[str, int] | None = None
    validation: Scores | None = None
    routing: Routing | None = None

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.loss is None and self.dropped is None and "loss" in self.model_fields_set:
            raise ValueError("a step without a loss must say why it was dropped")
        return self


class CheckpointRecord(Record):
    """`checkpoint.json`.

    Attributes:
        step: steps made.
        updates: steps whose gradient changed the weights.
        seconds: time of training so far.
        data: the receipt of what was read, by source.
        files: the checkpoint's other files by name.
    """

    step: int = Field(ge=0)
    updates: int = Field(ge=0)
    seconds: float = Field(ge=0)
    data: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, FileMark]
