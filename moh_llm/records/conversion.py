"""Where a model comes from: the record of its conversion, and its lineage.

`conversion.json` lies in the converted model's folder and in that of every model tuned from it. `lineage.json` lists
what was done to the weights since: a conversion begins it, and each training run adds an entry. Entries identify
weights by hashes, so that a change without an entry is found. No path of a machine is in the lineage.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moh_llm.records.base import Record
from moh_llm.records.seal import WeightHashes

CONVERSION, LINEAGE = "conversion.json", "lineage.json"
# What figures of a run are against: the checkpoint that the conversion names or, where that is not available, the
# model that the run began with. A run on images may name any model.
ReferenceKind = Literal["base", "start", "named"]
REFERENCES: dict[ReferenceKind, str] = {"base": "the base", "start": "the model it began with, all heads on"}
REFERENCES["named"] = "the model that its recipe names"


class Base(Record):
    """The checkpoint that was converted.

    Attributes:
        name: folder or Hub id, as the user gave it.
        revision: commit on the Hub; None for a folder.
        dense_sha256: `moh_llm.records.seal.WeightHashes.dense` of it.
    """

    name: str
    revision: str | None
    dense_sha256: str

    @property
    def label(self) -> str:
        """The Hub id, or the name of the folder without its path; RUN/model for a run's model."""
        parts = [part for part in self.name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
        if self.revision or not parts:
            return self.name
        return "/".join(parts[-2:]) if parts[-1] == "model" else parts[-1]


class Vocabulary(Record):
    """Tokens that the conversion added to the base's.

    Attributes:
        tokenizer: its name, without a path.
        new_tokens: the number of the tokenizer's tokens that the base has no row for.
        dense_sha256: `WeightHashes.dense` of the converted model, which differs from the base's.
    """

    tokenizer: str
    new_tokens: int
    dense_sha256: str | None = None


class Plan(Record):
    """What the conversion was asked for; the head plan itself is in the model's config.

    Attributes:
        preset: `paper`, or None.
        context: tokens in a sequence of calibration and verification.
        keys_read: share of the base's keys that the planned number of heads reads at that length.
    """

    preset: str | None
    context: int | None = None
    keys_read: float | None = None


class Calibration(Record):
    """The text that router and fallbacks were fitted on: tokens in all, and by the name of their source."""

    tokens: int
    tokens_of_source: dict[str, int]


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
    kl: float


class RetrievalFigures(Record):
    """Answers that base and converted model retrieve from a prompt, beyond the reach of local fallbacks.

    Attributes:
        base, converted: how many of those `asked` are right.
        nats: mean log-probability of one of them, less the base's; None in records that are older than it.
    """

    task: str
    asked: int
    base: int
    converted: int
    nats: float | None = None


class Verification(Record):
    """Results of `moh_llm.conversion.verify.verify`.

    Attributes:
        heads_read: heads that a held-out token has on, mean over layers.
        keys_read: share of the base's keys that the model reads in a document of the plan's length; None where all of
            the text is at the first tokens of documents, which have all heads on.
        by_position, retrieval: of long contexts.
    """

    dtype: str
    all_heads_active: AllHeadsActive
    held_out_tokens: int
    held_out_documents: int
    base_perplexity: float
    converted: Figures
    heads_read: float
    keys_read: float | None = None
    by_position: list[PositionFigures] = Field(default_factory=list)
    retrieval: list[RetrievalFigures] = Field(default_factory=list)


class ImageFigures(Record):
    """A model of images against its base, on images that nothing was fitted on.

    Attributes:
        error: mean squared difference of the outputs, as a share of the variance of the base's.
        kl: nats per image; `same_class`: share of images that both give the same class. None without classes.
        by_timestep: of a DiT, the error in each quarter of the timesteps.
    """

    images: int
    equals_base: bool
    error: float
    kl: float | None = None
    same_class: float | None = None
    by_timestep: list[float] = Field(default_factory=list)


class Parameters(Record):
    """Numbers of weights of the base, and of the routers and fallbacks that the conversion adds."""

    dense: int
    routers: int
    fallbacks: int


class Conversion(Record):
    """A conversion. Parts that were not carried out are None: new tokens, calibration, verification.

    Attributes:
        images: verification of a model of images.
        moh_llm: version of this package; ``versions``: of the libraries.
        made: the model that the figures describe.
        set_aside: why the record has the base alone: the model was changed by hand, so no figure describes it.
        device: name of the device.
        compute_dtype: dtype that base and converted model ran in, whatever their weights are stored in.
        seconds: duration without the start of Python and its libraries.
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
    parameters: Parameters | None = None
    verification: Verification | None = None
    images: ImageFigures | None = None
    seconds: float | None = None


def read_conversion(folder: Path) -> Conversion | None:
    """The record in a model's folder; None where there is none. Raises UserError for a malformed one."""
    path = folder / CONVERSION
    return Conversion.read(path) if path.is_file() else None


# ---- lineage


class ConversionEntry(Record):
    """A conversion of ``base`` (its name without a path), which has the hash ``dense_sha256``, into ``made``.

    ``new_tokens`` is how many tokens were added to the base's.
    """

    kind: Literal["conversion"]
    base: str
    dense_sha256: str
    made: WeightHashes
    new_tokens: int = 0


class RunEntry(Record):
    """A training run.

    Attributes:
        objective: "distillation", "cross_entropy" or "noise".
        tokens, steps: how long it trained; of a model of images, ``tokens`` counts images.
        mixture: the text, by its mixture's name, or the images, by their place's.
        seed: the recipe's.
        teacher: what taught it; None for cross-entropy.
        lora_rank: of its adapters; None where it had none.
        freeze_base: whether routers and fallbacks alone were trained.
        began_with, made: the weights before and after.
    """

    kind: Literal["run"]
    objective: str
    tokens: int
    steps: int
    mixture: str
    seed: int
    teacher: ReferenceKind | None
    lora_rank: int | None
    freeze_base: bool = False
    began_with: WeightHashes
    made: WeightHashes


Entry = Annotated[ConversionEntry | RunEntry, Field(discriminator="kind")]


class Chain(Record):
    """The recorded history of a model, oldest first; empty without a record."""

    entries: list[Entry]

    @property
    def runs(self) -> list[RunEntry]:
        """The training runs."""
        return [entry for entry in self.entries if isinstance(entry, RunEntry)]

    @property
    def tokens(self) -> int:
        """Training tokens of all runs."""
        return sum(run.tokens for run in self.runs)

    def with_entry(self, entry: ConversionEntry | RunEntry) -> "Chain":
        """The chain with one more entry."""
        return Chain(entries=[*self.entries, entry])

    def unrecorded(self) -> list[int]:
        """Positions of the entries that began with other weights than the entry before them made."""
        found = []
        for number in range(1, len(self.entries)):
            made, entry = self.entries[number - 1].made, self.entries[number]
            if isinstance(entry, RunEntry):
                same = entry.began_with.difference(made) is None
            else:
                same = entry.dense_sha256 == made.dense
            if not same:
                found.append(number)
        return found


def mixture_name(name: str | None, mixture: str) -> str:
    """Name of a mixture: its own, else that of its file or folder."""
    return last_component(name) if name else re.sub(r"\.ya?ml$", "", last_component(mixture))


def read_chain(folder: Path) -> Chain:
    """The lineage in a model's folder, empty where there is none. Raises UserError for a malformed one."""
    path = folder / LINEAGE
    return Chain.read(path) if path.is_file() else Chain(entries=[])


# ---- names


def last_component(name: str) -> str:
    """The last part of a path of any system; a name that is no path stays as it is."""
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] or name
