"""The records of a training run: `run.json`, a line of `log.jsonl`, and `checkpoint.json`."""

from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from moh_llm.records.base import Record
from moh_llm.records.lineage import ReferenceKind


class FileMark(Record):
    """Size in bytes and SHA-256 of a file, by which it is known again."""

    bytes: int = Field(ge=0)
    sha256: str


class ModelMark(Record):
    """What identifies the model that a run began with."""

    sha256: str


class ReferenceMark(Record):
    """What a run is compared with; the rest is for readers."""

    kind: ReferenceKind


class RunRecord(Record):
    """`OUTPUT/run.json`.

    Attributes:
        status: ``finished`` only when ``model_files`` were read back from disk.
        config: the recipe.
        model: what the run began with.
        data: what identifies the tokens, once they were opened.
        reference: what its figures are against; null where there is nothing.
        model_files: the files of ``OUTPUT/model`` by name, of a finished run.
    """

    status: Literal["new", "running", "finished"]
    config: dict[str, Any]
    model: ModelMark
    data: dict[str, Any] | None = None
    reference: ReferenceMark | None = None
    model_files: dict[str, FileMark] | None = None


class LogLine(Record):
    """A line of `OUTPUT/log.jsonl`: a step, or the scores before the first one (step 0, without a loss)."""

    step: int = Field(ge=0)
    loss: float | None = None
    dropped: str | None = None
    validation: dict[str, Any] | None = None
    routing: dict[str, Any] | None = None

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
