"""Reading a training run from its folder: `run.json` and `log.jsonl`, also while training goes on."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.reading import parse_json
from moh_llm.records.lineage import REFERENCES, ReferenceKind
from moh_llm.records.run import LogLine, Routing, RunRecord, Scores
from moh_llm.terminal import say
from moh_llm.training.config import TrainConfig

Record = dict[str, Any]


@dataclass(frozen=True)
class TrainingRun:
    """What a run has written so far.

    ``recipe`` is complete: keys that came after the run was made have their defaults. ``lines`` are
    those of the log; ``cut`` says that a last one, which a kill cut short, is left out.
    """

    name: str
    folder: Path
    record: RunRecord
    recipe: Record
    lines: list[LogLine]
    cut: bool

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return self.recipe["seed"]

    @property
    def reference(self) -> ReferenceKind:
        """What its ratios and KLs are against: the base only where that is on record."""
        return "start" if self.record.reference is None else self.record.reference.kind

    @property
    def compares(self) -> bool:
        """Whether it has figures against its reference."""
        scores = [*self.scores, *([self.saved_score] if self.saved_score else [])]
        return bool(self.points("kl")[0]) or any(score["kl"] is not None for score in scores)

    @property
    def tokens(self) -> int:
        """Training tokens read so far."""
        return self.tokens_of(self.lines[-1])

    def tokens_of(self, line: LogLine) -> int:
        """Training tokens read up to a line of the log."""
        data = self.recipe["data"]
        return line.step * data["batch_size"] * data["sequence_length"] if line.tokens is None else line.tokens

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """Training tokens and a number of the log, over the steps that have it and were not dropped.

        ``key`` is dotted, such as ``timing.tokens_per_second``.
        """
        read = attrgetter(key)
        tokens, values = [], []
        for line in self.lines:
            try:
                value = read(line)
            except AttributeError:  # this line has no such part
                continue
            if isinstance(value, int | float) and not line.dropped:
                tokens.append(self.tokens_of(line))
                values.append(value)
        return tokens, values

    @property
    def dropped(self) -> list[Record]:
        """Steps that divergence handling dropped: step, tokens, reason."""
        return [
            {"step": line.step, "tokens": self.tokens_of(line), "reason": line.dropped}
            for line in self.lines
            if line.dropped
        ]

    @property
    def scores(self) -> list[Record]:
        """Each score on held-out text, with the router health beside it where the log has that."""
        return [
            {"step": line.step, "tokens": self.tokens_of(line), **_score(line.validation)}
            | {"routing": routing_summary(line.routing)}
            for line in self.lines
            if line.validation is not None
        ]

    @property
    def saved_score(self) -> Record | None:
        """The score of the saved model, which a finished run has."""
        found = self.record.evaluation
        if found is None:
            return None
        extra = {"all_heads_kl": found.all_heads and found.all_heads.kl, "dtype": found.dtype}
        return {"step": self.lines[-1].step, "tokens": self.tokens, **_score(found)} | extra

    @property
    def floor(self) -> float | None:
        """KL to the reference before the first step with all heads on, where that is its floor (`measure_floor`)."""
        first = next((line.validation for line in self.lines if line.step == 0), self.record.evaluation)
        return first and first.floor

    @property
    def routing(self) -> Routing | None:
        """The last router health of the log."""
        return next((line.routing for line in reversed(self.lines) if line.routing), None)


def read_runs(
    folders: Sequence[Path], behind: Sequence[Path] = (), say: Callable[[str], None] = say
) -> list[TrainingRun]:
    """Read the runs of some folders. Each is named by the end of its path that sets it apart.

    Args:
        folders: those that the user named.
        behind: more of them, as `runs_behind` found them: one that cannot be read is left out.
        say: prints a line about one that is left out.

    Raises:
        UserError: one of ``folders`` is none, is named twice, or holds no run that has begun.
    """
    names = names_of([*folders, *behind])
    runs = [_read_run(folder, name) for folder, name in zip(folders, names, strict=False)]
    for folder, name in zip(behind, names[len(folders) :], strict=True):
        try:
            runs.append(_read_run(folder, name))
        except UserError as error:
            say(f"the report leaves out the curves of {folder}: {error}")
    return runs


def summarise(run: TrainingRun) -> Record:
    """The figures of one run, JSON-ready. Seconds are those of steps, without scoring and saving."""
    recipe, lines = run.recipe, run.lines
    speeds = run.points("timing.tokens_per_second")[1]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": run.record.status,
        "model": recipe["model"],
        "mixture": recipe["data"]["mixture"],
        "objective": recipe["objective"],
        "reference": REFERENCES[run.reference] if run.compares else None,
        "floor": run.floor,
        "lora": recipe["lora"],
        "seed": run.seed,
        "device": run.record.device,
        "device_name": run.record.device_name,
        "compute_dtype": run.record.compute_dtype,
        "processes": run.record.processes,
        "parameters": run.record.parameters,
        "steps": lines[-1].step,
        "max_steps": recipe["max_steps"],
        "tokens": run.tokens,
        "seconds": round(sum(line.timing.seconds for line in lines if line.timing), 3),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "loss": _loss(run),
        "dropped": run.dropped,
        "scores": run.scores,
        "saved_model": run.saved_score,
        "last_log_line_cut": run.cut,
    }


def names_of(folders: Sequence[Path]) -> list[str]:
    """Each folder by the end of its path that sets it apart. Raises UserError for one that is named twice."""
    places = [folder.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"{folders[index]} is named twice; name each folder once")
    length = 1
    while len({place.parts[-length:] for place in places}) < len(places):
        length += 1
    return ["/".join(place.parts[-length:]) for place in places]


def runs_behind(models: Iterable[str], known: Sequence[Path] = ()) -> list[Path]:
    """Folders of the training runs that made some of the models, as far as they lie on this machine.

    Args:
        models: folders or Hub ids; a run keeps its tuned model in RUN/model.
        known: runs that are left out.
    """
    taken = {folder.resolve() for folder in known}
    found: dict[Path, Path] = {}
    for model in models:
        run = Path(model).resolve().parent
        begun = (run / "run.json").is_file() and (run / "log.jsonl").is_file()
        if Path(model).name == "model" and begun and run not in taken:
            found[run] = Path(model).parent
    return list(found.values())


def routing_summary(routing: Routing | None) -> Record | None:
    """Router health over all layers: dead heads, of how many that tokens choose, lowest entropy, changed share."""
    if not routing:
        return None
    entropy = [value for value in routed(routing, "entropy") if value is not None]
    return {
        "dead_heads": sum(routing.dead_heads),
        "routed_heads": sum(map(len, routing.load)),
        "lowest_entropy": min(entropy, default=None),
        "changed": routing.tokens_with_other_heads,
        "heads_read": routing.heads_read,
    }


def routed(routing: Routing, key: str) -> list[float | None]:
    """A list over layers of the log's router health, None for layers in which none chooses; [] where it lacks it."""
    values = getattr(routing, key) or []
    return [value if load else None for value, load in zip(values, routing.load, strict=False)]


def _score(found: Scores) -> Record:
    other = found.reference_perplexity
    return {
        "held_out_tokens": found.tokens,
        "held_out_documents": found.documents,
        "perplexity": found.perplexity,
        "reference_perplexity": other,
        "ratio": found.perplexity / other if other else None,
        "ratio_interval": found.ratio_interval,
        "kl": found.kl,
        "kl_interval": found.kl_interval,
        "top1_agreement": found.top1_agreement,
    }


def _loss(run: TrainingRun) -> Record | None:
    counted = [line for line in run.lines if line.loss is not None and not line.dropped]
    if not counted:
        return None
    chosen = {"first": counted[0], "last": counted[-1], "lowest": min(counted, key=lambda line: line.loss)}
    return {which: {"step": line.step, "loss": line.loss} for which, line in chosen.items()}


def _read_run(folder: Path, name: str) -> TrainingRun:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name one that moh-llm train made")
    if not (folder / "run.json").is_file():
        raise UserError(f"{folder} holds no run.json; name a folder that moh-llm train made")
    record = RunRecord.read(folder / "run.json")
    if not {"model", "output_dir", "max_steps"} <= record.config.keys():
        raise UserError(f"{folder / 'run.json'} is not the record of a training run; name another folder")
    defaults = json.loads(json.dumps(asdict(TrainConfig(model="-", output_dir="-", max_steps=10**9))))
    lines, cut = _read_log(folder / "log.jsonl")
    return TrainingRun(name, folder, record, _completed(record.config, defaults), lines, cut)


def _completed(recorded: Record, defaults: Record) -> Record:
    """A recipe with the keys that it lacks."""
    filled = defaults | recorded
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(filled[name], dict):
            filled[name] = _completed(filled[name], value)
    return filled


def _read_log(path: Path) -> tuple[list[LogLine], bool]:
    """The log's lines, and whether a last one was cut short."""
    try:
        texts = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; wait for the run's first step, or start it again") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name another folder") from error
    lines: list[LogLine] = []
    cut = False
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            lines.append(LogLine.of(parse_json(text, f"{path}: line {number}"), f"{path}: line {number}"))
        except UserError as error:
            # Complete lines end in a line feed, so what follows the last one may be half a line.
            if number < len(texts):
                raise UserError(
                    f"{error}; start the run again, which cuts the log there, or remove the line"
                ) from error
            cut = True
    if not lines:
        raise UserError(f"{path} holds no step yet; wait for the run's first one")
    return lines, cut
