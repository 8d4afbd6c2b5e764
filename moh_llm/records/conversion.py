"""The record of a conversion, `conversion.json` in the converted model's folder and in every model tuned from it."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from moh_llm.errors import UserError
from moh_llm.records.base import Record
from moh_llm.records.seal import WeightHashes

NAME = "conversion.json"


class Base(Record):
    """The checkpoint that was converted.

    Attributes:
        name: folder or Hub id, as the user gave it.
        revision: commit on the Hub; None for a folder.
        fingerprint: `moh_llm.records.identity.fingerprint` of its shards.
        dense_sha256: `moh_llm.records.identity.WeightHashes.dense` of it.
    """

    name: str
    revision: str | None = None
    fingerprint: str | None = None
    dense_sha256: str | None = None

    @property
    def label(self) -> str:
        """Its display name without a local path: its Hub id, or the name of its folder, RUN/model for a run's."""
        return self.name if self.revision else folder_name(self.name)


class Vocabulary(Record):
    """Tokens that the conversion added to the base's.

    Attributes:
        tokenizer: its name, without a path.
        base_rows, rows: of the embedding, in the base and now.
        new_tokens: how many of the tokenizer's tokens the base has no row for.
        dense_sha256: `moh_llm.records.identity.WeightHashes.dense` of the converted model. The base has another.
    """

    tokenizer: str
    base_rows: int
    rows: int
    new_tokens: int
    dense_sha256: str | None = None


class Plan(Record):
    """Which heads are on, and by what rule: the options of the conversion and fields of the model's config.

    Attributes:
        shared: "first" or "importance": how the shared heads were chosen.
        budgets: "uneven" or "even".
        shared_heads: per layer, ids of the shared heads.
        active_heads: per layer, heads per token that are asked for; with threshold routers a mean over the text that
            they were fitted on, without a document's first tokens where these have all heads on.
        context: tokens in a sequence of calibration and verification.
        keys_read: share of the keys of the base's attention that is read at that length with as many heads on as are
            asked for.
        local_window, local_sinks: what local fallbacks attend to; None with others.
        local_start: how many first tokens of a document have all heads on.
    """

    preset: str | None
    router_type: str
    router_score: str
    routing_granularity: str
    head_fallback: str
    shared: str
    budgets: str
    num_attention_heads: int
    shared_heads: list[list[int]]
    active_heads: list[int]
    context: int | None = None
    keys_read: float | None = None
    local_window: int | None = None
    local_sinks: int | None = None
    local_start: int | None = None


class Calibration(Record):
    """The text that router and fallbacks were fitted on.

    Attributes:
        sources: name -> share of the tokens that were read; of the mixture's weight in records without
            `tokens_of_source`.
        tokens_of_source: name -> tokens that were read.
        estimated_kl_by_drops: per layer, number of dropped heads -> estimated KL in nats per token.
    """

    mixture: str
    sources: dict[str, float]
    tokens: int
    tokens_of_source: dict[str, int] | None = None
    estimated_kl_by_drops: list[dict[str, float]]


class AllHeadsActive(Record):
    """Whether each layer's output with every head on equalled the base's, and on how many tokens."""

    equals_base: bool
    tokens: int


class Figures(Record):
    """A model against the base on held-out text; KL in nats per token; 95 % intervals, None below 5 documents."""

    perplexity: float
    perplexity_ratio: float
    ratio_interval: list[float] | None
    kl: float
    kl_interval: list[float] | None
    top1_agreement: float


class PositionFigures(Record):
    """The converted model against the base at some positions of held-out documents: from `start` up to the next."""

    start: int
    tokens: int
    perplexity_ratio: float
    kl: float


class RetrievalFigures(Record):
    """Answers that base and converted model retrieve from a prompt, beyond the reach of local fallbacks."""

    task: str
    asked: int
    base: int
    converted: int


class LayerFigures(Record):
    """A layer against the base's on held-out text.

    Attributes:
        attention_output_error: ||attention output - base's|| / ||base's|| over all tokens.
        head_load: per head, the share of tokens that have it on.
    """

    attention_output_error: float
    head_load: list[float]


class Verification(Record):
    """Results of `moh_llm.conversion.verify.verify`; `by_position` and `retrieval` for long contexts."""

    dtype: str
    all_heads_active: AllHeadsActive
    held_out_tokens: int
    held_out_documents: int
    base_perplexity: float
    converted: Figures
    layers: list[LayerFigures]
    by_position: list[PositionFigures] = Field(default_factory=list)
    retrieval: list[RetrievalFigures] = Field(default_factory=list)

    @property
    def heads_read(self) -> float | None:
        """Heads that a token of the held-out text has on, mean over layers; None without layers."""
        return sum(sum(layer.head_load) for layer in self.layers) / len(self.layers) if self.layers else None


class Parameters(Record):
    """Numbers of weights: of the base, and of the converted model; those of its routers and of its fallbacks."""

    dense: int
    moh: int
    routers: int | None = None
    fallbacks: int | None = None


class ForwardFlops(Record):
    """Theoretical FLOPs of a forward pass, of the base and of the converted model, and the second over the first."""

    dense: int
    moh: int
    ratio: float


class Arithmetic(Record):
    """Cost of the converted model; ``forward_flops``: tokens of a sequence -> FLOPs, assuming ``assumes``.

    Lengths are the conversion's context and `moh_llm.flops.LENGTHS` up to the base's longest.
    """

    parameters: Parameters
    forward_flops: dict[str, ForwardFlops]
    assumes: str


class Conversion(Record):
    """A conversion. A part is None where it was not carried out: new tokens, a plan without fitting, verification.

    Attributes:
        moh_llm: version of this package; ``versions``: of others.
        made: the model that it made, which all figures are of; None in records of earlier versions.
        set_aside: why all but the base is missing: the model was changed by hand, so that no figure was of it.
        device: that it ran on, by name.
        compute_dtype: that base and converted model were run in, whatever their weights are stored in.
        seconds: how long it took, without the start of Python and its libraries.
        peak_memory_mib: the most memory that the process held, in MiB.
    """

    moh_llm: str | None = None
    versions: dict[str, str] | None = None
    base: Base
    made: WeightHashes | None = None
    set_aside: str | None = None
    device: str | None = None
    compute_dtype: str | None = None
    vocabulary: Vocabulary | None = None
    plan: Plan | None = None
    calibration: Calibration | None = None
    arithmetic: Arithmetic | None = None
    verification: Verification | None = None
    seconds: float | None = None
    peak_memory_mib: int | None = None


def read_conversion(folder: Path) -> Conversion | None:
    """The record in a model's folder; None where there is none.

    Raises:
        UserError: the file is no such record, or one of an older version that lacks something.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        return Conversion.read(path)
    except UserError as error:
        raise UserError(f"{error}; convert the model again") from error


def last_component(name: str) -> str:
    """The last part of a path, of whichever system; a name that is no path as it is."""
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] or name


def folder_name(path: str) -> str:
    """A model's folder as it is called: the last part of its path, with that before it for RUN/model."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-2:]) if parts[-1:] == ["model"] else last_component(path)


def distinct_ends(names: Sequence[str]) -> list[str]:
    """The last parts of paths, as many of each as tell it from the others: `en/x.jsonl` and `de/x.jsonl`."""
    parts = [name.replace("\\", "/").rstrip("/").split("/") for name in names]
    shown = [last_component(name) for name in names]
    for count in range(2, 1 + max(map(len, parts), default=0)):
        shown = ["/".join(own[-count:]) if shown.count(end) > 1 else end for own, end in zip(parts, shown, strict=True)]
    return shown
