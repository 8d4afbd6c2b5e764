"""The record of an evaluation, `report.json`. Scores, errors and shares are in percent, intervals hold 95 %."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from moh_llm.errors import UserError
from moh_llm.reading import read_json
from moh_llm.records.base import Record

VERSION = 2
FEWEST_ITEMS = 100  # a score on fewer items is no result


class Value(Record):
    """A mean over items, lm-eval's standard error, and a 95 % interval; both are None for a single item.

    The error is 0 where all items are equal; the interval is never empty (`statistics.mean_interval`). It may reach
    beyond the values that a mean can have; reports cut it there.
    """

    value: float
    stderr: float | None
    interval: list[float] | None = None


class Share(Record):
    """Share of the base's figure that a model keeps.

    Attributes:
        share: None where the base's figure is not above 0.
        interval: None where the base's figure is not clearly above 0, or one of the figures has no interval.
        base_errors: number of standard errors that the base's figure lies above 0, where it is not clearly above.
    """

    share: float | None
    interval: list[float] | None = None
    base_errors: float | None = None


class Figures(Value):
    """A model on a benchmark.

    Attributes:
        tasks: value and number of items of each lm-eval task.
        margin: the score minus the score of guessing.
        delta: difference to the base on the same items.
        recovery, margin_kept: shares of the base's score and of its margin.
        at_chance: whether the base's margin may be 0; then there is no share of it.
    """

    items: int
    truncated: bool
    tasks: dict[str, dict[str, Any]]
    margin: Value | None = None
    delta: Value | None = None
    recovery: Share | None = None
    at_chance: bool | None = None
    margin_kept: Share | None = None


class Row(Record):
    """A benchmark, and the figures of each model that was scored on it, by the model's label.

    Attributes:
        data_sha256: hash of local data; None for data of the Hub, which ``revision`` identifies.
        items_in_full: number of items of the complete benchmark.
        chance: the score of guessing; None where it is unknown.
        published: the paper's figures by column.
    """

    name: str
    shots: int
    metric: str
    dataset: str
    dataset_config: str | None
    revision: str | None
    data_sha256: str | None
    eval_split: str
    fewshot_split: str | None
    items_in_full: int
    chance: float | None
    note: str
    published: dict[str, float]
    scores: dict[str, Figures]

    @property
    def partial(self) -> bool:
        """Whether a model was scored on only some of the items."""
        return any(figures.items < self.items_in_full for figures in self.scores.values())


class MarginAverage(Share):
    """Share of the base's mean margin over the ``over`` benchmarks where the base is above chance."""

    over: int


class AverageFigures(Value):
    """A model's mean over benchmarks, compared with its base's as in `Figures`."""

    delta: Value | None = None
    recovery: Share | None = None
    margin_kept: MarginAverage | None = None


class Average(Record):
    """Plain means over the ``over`` of ``total`` benchmarks that every model has a score on."""

    over: int
    total: int
    published: dict[str, float | None]
    scores: dict[str, AverageFigures]


class ModelRecord(Record):
    """A scored model and how it was run.

    Attributes:
        model: folder or Hub id.
        weights_sha256: of the weights of a folder; ``revision``: commit of a model on the Hub.
        plan_sha256: of the head plan of a folder (`moh_llm.records.identity.hash_plan`).
        changed: why the records in its folder are not of it, where they are not; nothing is then taken from them.
        compared: whether the base was scored on the same items.
        dtype: what it was computed in.
        attention_backend: which of `moh_llm.attention` its layers with heads off take; None: it has no such layers, or
            all results were kept from an earlier call.
        other_base: the base that its conversion names, where that is another one.
    """

    model: str
    weights_sha256: str | None
    revision: str | None
    plan_sha256: str | None = None
    changed: str | None = None
    dtype: str
    device: str
    hardware: str
    context: int
    seconds: float
    items: int
    compared: bool
    attention_backend: str | None = None
    other_base: str | None = None
    model_type: str | None = None
    heads: dict[str, Any] = Field(default_factory=dict)
    records: list[str] = Field(default_factory=list)


class Failure(Record):
    """A benchmark that failed on a model."""

    model: str
    benchmark: str
    error: str


class SuiteRecord(Record):
    """The suite; ``columns``: the published ones."""

    name: str
    title: str
    columns: list[str]


class EvaluationRecord(Record):
    """An evaluation.

    Attributes:
        models: by label; the base's is "base".
        limit: items of each task; None: all.
        partial_data: benchmarks whose data lacks items.
        analysis: what the heads of MoH models did, by label (`moh_llm.analysis`).
    """

    version: Literal[2] = VERSION
    suite: SuiteRecord
    models: dict[str, ModelRecord]
    benchmarks: list[Row]
    average: Average
    errors: list[Failure]
    limit: int | None
    partial_data: list[str]
    data: str
    dtype: str
    batch_size: int | str
    processes: int
    seeds: dict[str, Any]
    versions: dict[str, Any]
    command: str
    created: str
    analysis: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def compared_models(self) -> list[str]:
        """The labels of all models but the base."""
        return [label for label in self.models if label != "base"]

    @property
    def analyses(self) -> dict[str, dict[str, Any]]:
        """The head analyses that did not fail, by label."""
        return {label: found for label, found in self.analysis.items() if "error" not in found}

    def results(self, label: str) -> list[Row]:
        """The benchmarks on which a model's score covers all items, and at least `FEWEST_ITEMS` of them."""
        rows = [row for row in self.benchmarks if label in row.scores and row.name not in self.partial_data]
        return [row for row in rows if self.limit is None and row.items_in_full >= FEWEST_ITEMS]


def read_evaluation(folder: Path) -> EvaluationRecord:
    """Read the record that `moh-llm evaluate` wrote into ``folder``.

    Raises UserError where the folder holds no report, or a report of training runs or of another version.
    """
    path = folder / "report.json"
    if not path.is_file():
        found = "holds no report.json" if folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {found}; name a folder that `moh-llm evaluate` wrote")
    record = read_json(path)
    if not isinstance(record, dict) or "benchmarks" not in record:
        raise UserError(f"{path} is not the report of an evaluation; name a folder that `moh-llm evaluate` wrote")
    if record.get("version") != VERSION:
        raise UserError(f"{path} is of another version of moh-llm; evaluate again with this one")
    return EvaluationRecord.parse(record, str(path))
