"""A training run as its folder tells it: `run.json` and `log.jsonl`, also while training goes on."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.reading import read_json
from moh_llm.records.lineage import REFERENCES, ReferenceKind
from moh_llm.reporting.evaluations import names_of
from moh_llm.training.config import TrainConfig

Record = dict[str, Any]


@dataclass(frozen=True)
class TrainingRun:
    """What a run has left so far.

    ``recipe`` is complete: keys that came after the run was made have their defaults. ``lines`` are
    those of the log; ``cut`` says that a last one, which a kill cut short, is left out.
    """

    name: str
    folder: Path
    record: Record
    recipe: Record
    lines: list[Record]
    cut: bool

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return self.recipe["seed"]

    @property
    def reference(self) -> ReferenceKind:
        """What its ratios and KLs are against: the base only where that is on record."""
        return "base" if look_up(self.record, "reference.kind") == "base" else "start"

    @property
    def compares(self) -> bool:
        """Whether it has figures against its reference."""
        scores = [*self.scores, *([self.saved_score] if self.saved_score else [])]
        return bool(self.points("kl")[0]) or any(score["kl"] is not None for score in scores)

    def tokens_of(self, line: Record) -> int:
        """Training tokens read up to a line of the log."""
        data = self.recipe["data"]
        return line.get("tokens", line["step"] * data["batch_size"] * data["sequence_length"])

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """Training tokens and a number of the log, over the steps that have it and were not dropped.

        ``key`` is dotted, such as ``timing.tokens_per_second``.
        """
        tokens, values = [], []
        for line in self.lines:
            value = number(look_up(line, key))
            if value is not None and not line.get("dropped"):
                tokens.append(self.tokens_of(line))
                values.append(value)
        return tokens, values

    @property
    def dropped(self) -> list[Record]:
        """Steps that divergence handling dropped: step, tokens, reason."""
        return [
            {"step": line["step"], "tokens": self.tokens_of(line), "reason": str(line["dropped"])}
            for line in self.lines
            if line.get("dropped")
        ]

    @property
    def scores(self) -> list[Record]:
        """Each score on held-out text, with the router health beside it where the log has that."""
        return [
            {"step": line["step"], "tokens": self.tokens_of(line), **_score(line["validation"])}
            | {"routing": routing_summary(line.get("routing"))}
            for line in self.lines
            if isinstance(line.get("validation"), dict)
        ]

    @property
    def saved_score(self) -> Record | None:
        """The score of the saved model, which a finished run has."""
        found = self.record.get("evaluation")
        if not isinstance(found, dict):
            return None
        extra = {"all_heads_kl": number(look_up(found, "all_heads.kl")), "dtype": found.get("dtype")}
        return {"step": self.lines[-1]["step"], "tokens": self.tokens_of(self.lines[-1]), **_score(found)} | extra

    @property
    def floor(self) -> float | None:
        """KL to the reference before the first step with all heads on, where that is its floor (`measure_floor`)."""
        found = [number(look_up(line, "validation.floor")) for line in self.lines if line["step"] == 0]
        return found[0] if found else number(look_up(self.record, "evaluation.floor"))

    @property
    def routing(self) -> Record | None:
        """The last router health of the log."""
        found = [line["routing"] for line in self.lines if line.get("routing")]
        return found[-1] if found else None


def read_runs(
    folders: Sequence[Path], behind: Sequence[Path] = (), say: Callable[[str], None] = print
) -> list[TrainingRun]:
    """Read the runs of some folders. Each is named by the end of its path that sets it apart.

    Args:
        folders: those that the user named.
        behind: more of them, as `runs_behind` found them: one that cannot be read is told and left out.
        say: takes what is told.

    Raises:
        UserError: one of ``folders`` is none, is named twice, or holds no run that has begun.
    """
    names = names_of([*folders, *behind])
    runs = [_read_run(folder, name) for folder, name in zip(folders, names, strict=False)]
    for folder, name in zip(behind, names[len(folders) :], strict=True):
        try:
            runs.append(_read_run(folder, name))
        except UserError as error:
            say(f"the report goes without the curves of {folder}: {error}")
    return runs


def summarise(run: TrainingRun) -> Record:
    """The figures of one run, JSON-ready. Seconds are those of steps, without scoring and saving."""
    recipe, lines = run.recipe, run.lines
    speeds = run.points("timing.tokens_per_second")[1]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": run.record.get("status"),
        "model": recipe["model"],
        "mixture": recipe["data"]["mixture"],
        "objective": recipe["objective"],
        "reference": REFERENCES[run.reference] if run.compares else None,
        "floor": run.floor,
        "lora": recipe["lora"],
        "seed": run.seed,
        "device": run.record.get("device"),
        "processes": run.record.get("processes"),
        "parameters": run.record.get("parameters"),
        "steps": lines[-1]["step"],
        "max_steps": recipe["max_steps"],
        "tokens": run.tokens_of(lines[-1]),
        "seconds": round(sum(number(look_up(line, "timing.seconds")) or 0.0 for line in lines), 3),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "loss": _loss(run),
        "dropped": run.dropped,
        "scores": run.scores,
        "saved_model": run.saved_score,
        "last_log_line_cut": run.cut,
    }


def routing_summary(routing: Record | None) -> Record | None:
    """Router health over all layers: dead heads, of how many routed ones, lowest entropy, mean changed share."""
    if not routing:
        return None
    entropy, changed = (
        [value for value in routed(routing, key) if value is not None] for key in ("entropy", "changed")
    )
    return {
        "dead_heads": sum(routing["dead_heads"]),
        "routed_heads": sum(map(len, routing["load"])),
        "lowest_entropy": min(entropy, default=None),
        "changed": statistics.fmean(changed) if changed else None,
    }


def routed(routing: Record, key: str) -> list[float | None]:
    """A list over layers of the log's router health, None for layers that have no routed head; [] where it lacks it."""
    values = routing.get(key) or []
    return [value if load else None for value, load in zip(values, routing["load"], strict=False)]


def look_up(record: Record, key: str) -> Any:
    """The value of a dotted key, None where there is none."""
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def number(value: Any) -> float | None:
    """A finite number as it is, None for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _score(found: Record) -> Record:
    perplexity, other = number(found.get("perplexity")), number(found.get("reference_perplexity"))
    return {
        "held_out_tokens": found.get("tokens"),
        "held_out_documents": found.get("documents"),
        "perplexity": perplexity,
        "reference_perplexity": other,
        "ratio": perplexity / other if perplexity is not None and other else None,
        "ratio_interval": found.get("ratio_interval"),
        "kl": number(found.get("kl")),
        "kl_interval": found.get("kl_interval"),
        "top1_agreement": number(found.get("top1_agreement")),
    }


def _loss(run: TrainingRun) -> Record | None:
    counted = [line for line in run.lines if number(line.get("loss")) is not None and not line.get("dropped")]
    if not counted:
        return None
    chosen = {"first": counted[0], "last": counted[-1], "lowest": min(counted, key=lambda line: line["loss"])}
    return {which: {"step": line["step"], "loss": line["loss"]} for which, line in chosen.items()}


def _read_run(folder: Path, name: str) -> TrainingRun:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name one that moh-llm train made")
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder} holds no run.json; name a folder that moh-llm train made")
    record = read_json(folder / "run.json")
    config = record.get("config") if isinstance(record, dict) else None
    if not isinstance(config, dict) or not {"model", "output_dir", "max_steps"} <= config.keys():
        raise UserError(f"{folder / 'run.json'} is not the record of a training run; name another folder")
    defaults = json.loads(json.dumps(asdict(TrainConfig(model="-", output_dir="-", max_steps=10**9))))
    lines, cut = _read_log(folder / "log.jsonl")
    return TrainingRun(name, folder, record, _completed(config, defaults), lines, cut)


def _completed(recorded: Record, defaults: Record) -> Record:
    """A recipe with the keys that it lacks."""
    filled = defaults | recorded
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(filled[name], dict):
            filled[name] = _completed(filled[name], value)
    return filled


def _read_log(path: Path) -> tuple[list[Record], bool]:
    """The log's lines, and whether a last one was cut short."""
    try:
        texts = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; wait for the run's first step, or start it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name another folder") from error
    lines: list[Record] = []
    cut = False
    for index, text in enumerate(texts):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            step = line["step"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            # Whole lines end in a line feed, so what follows the last one may be half a line.
            if index < len(texts) - 1:
                raise UserError(
                    f"{path}: line {index + 1} is not one that training wrote; start the run again, which cuts the "
                    "log there, or remove the line"
                ) from error
            cut = True
        else:
            if not isinstance(step, int):
                raise UserError(f"{path}: line {index + 1} has step {step!r}, not a whole number; remove the line")
            lines.append(line)
    if not lines:
        raise UserError(f"{path} holds no step yet; wait for the run's first one")
    return lines, cut
