"""The record of a conversion, `conversion.json` in the converted model's folder and in every model tuned from it."""

from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.records.base import Record

NAME = "conversion.json"


class Base(Record):
    """The checkpoint that was converted.

    Attributes:
        name: folder or Hub id, as the user gave it.
        revision: commit on the Hub; None for a folder.
        fingerprint: `moh_llm.records.model.fingerprint` of its shards.
        dense_sha256: `moh_llm.records.model.WeightHashes.dense` of it.
    """

    name: str
    revision: str | None = None
    fingerprint: str | None = None
    dense_sha256: str | None = None

    @property
    def label(self) -> str:
        """What to call it without a path of this machine: its Hub id, or the last component of its path."""
        return self.name if self.revision else last_component(self.name)


class Plan(Record):
    """Which heads are on, and by what rule."""

    preset: str | None = None


class Calibration(Record):
    """The text that router and fallbacks were fitted on; ``sources``: name -> share."""

    mixture: str
    sources: dict[str, float]
    tokens: int


class AllHeadsActive(Record):
    """Whether each layer's output with every head on equalled the base's, and on how many tokens."""

    equals_base: bool
    tokens: int


class Figures(Record):
    """A model against the base on held-out text; KL in nats per token; 95 % intervals, None for one document."""

    perplexity: float
    perplexity_ratio: float
    ratio_interval: list[float] | None
    kl: float
    kl_interval: list[float] | None
    top1_agreement: float


class Verification(Record):
    """What `moh_llm.conversion.verify.verify` found."""

    dtype: str
    all_heads_active: AllHeadsActive
    held_out_tokens: int
    held_out_documents: int
    base_perplexity: float
    converted: Figures
    paper_router: Figures
    random_heads: Figures
    paper_active_heads: int


class Parameters(Record):
    """Numbers of weights: of the base, and of the converted model."""

    dense: int
    moh: int


class Arithmetic(Record):
    """What the converted model costs."""

    parameters: Parameters


class Conversion(Record):
    """A conversion. A part is None where it was not carried out: a plan without fitting, no verification."""

    base: Base
    plan: Plan | None = None
    calibration: Calibration | None = None
    verification: Verification | None = None
    arithmetic: Arithmetic | None = None
    moh_llm: str | None = None
    versions: dict[str, str] | None = None


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
