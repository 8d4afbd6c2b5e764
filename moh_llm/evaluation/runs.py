"""Training runs in reports: their folders, read also while training goes on, and the groups that runs form."""

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.reading import parse_json
from moh_llm.records.conversion import REFERENCES, ReferenceKind, in_words
from moh_llm.records.run import LogLine, Routing, RunRecord, Scores
from moh_llm.terminal import say
from moh_llm.training.changed_options import changed_options
from moh_llm.training.config import TrainConfig

Record = dict[str, Any]
METRICS = ("ratio", "kl", "top1_agreement", "perplexity")


@dataclass(frozen=True)
class TrainingRun:
    """What a run has written so far.

    Attributes:
        name: the end of its folder's path that sets it apart from the other runs.
        folder: its ``output_dir``.
        record: ``run.json``.
        recipe: the recipe, with defaults for options that are newer than the run.
        lines: ``log.jsonl``; each line has its number of tokens.
        cut: whether the log's last line was incomplete, as a kill leaves it, and is left out.
    """

    name: str
    folder: Path
    record: RunRecord
    recipe: Record
    lines: list[LogLine]
    cut: bool

    @property
    def tokens(self) -> int:
        """Training tokens read so far."""
        return self.lines[-1].tokens or 0

    @property
    def reference(self) -> ReferenceKind:
        """The model that ratios and KLs compare with: the base only if the record says so."""
        return self.record.reference or "start"

    @property
    def compares(self) -> bool:
        """Whether any figure compares with the reference."""
        scores = [*(line.validation for line in self.scored), self.record.evaluation]
        return bool(self.points("kl")) or any(found and found.kl is not None for found in scores)

    @property
    def scored(self) -> list[LogLine]:
        """The lines that have scores on held-out text."""
        return [line for line in self.lines if line.validation]

    @property
    def routing(self) -> Routing | None:
        """The last router health of the log."""
        return next((line.routing for line in reversed(self.lines) if line.routing), None)

    def points(self, key: str) -> list[tuple[int, float]]:
        """Training tokens and values of a number in the log, such as ``timing.seconds``, without dropped steps."""
        read, found = attrgetter(key), []
        for line in self.lines:
            try:
                value = read(line)
            except AttributeError:  # this line has no such part
                continue
            if isinstance(value, int | float) and not line.dropped:
                found.append((line.tokens, value))
        return found

    def figures(self) -> Record:
        """Steps, speed, losses and scores, as ``report.json`` has them. Seconds are without scoring and saving."""
        speeds = [speed for _, speed in self.points("timing.tokens_per_second")]
        counted = [line for line in self.lines if line.loss is not None and not line.dropped]
        lowest = min(counted, key=attrgetter("loss"), default=None)
        marks = {"first": counted[0], "last": counted[-1], "lowest": lowest} if counted else {}
        saved = self.record.evaluation
        return {
            "name": self.name,
            "folder": str(self.folder),
            "status": self.record.status,
            "seed": self.recipe["seed"],
            "steps": self.lines[-1].step,
            "tokens": self.tokens,
            "seconds": round(sum(line.timing.seconds for line in self.lines if line.timing), 3),
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "loss": {which: {"step": line.step, "loss": line.loss} for which, line in marks.items()},
            "dropped": {line.step: line.dropped for line in self.lines if line.dropped},
            "scores": [{"ratio": line.validation.ratio, **line.content()} for line in self.scored],
            "saved_model": {"ratio": saved.ratio, **saved.content()} if saved else None,
        }


@dataclass(frozen=True)
class Group:
    """Runs that differ only by their seed."""

    name: str
    runs: tuple[TrainingRun, ...]


def read_runs(
    folders: Sequence[Path], behind: Sequence[Path] = (), say: Callable[[str], None] = say
) -> list[TrainingRun]:
    """Read the training runs in some folders.

    Args:
        folders: folders that the user named.
        behind: folders that `runs_behind` found; a run that cannot be read is left out.
        say: prints a line about each run that is left out.

    Raises:
        UserError: one of ``folders`` is no folder, is named twice, or holds no run that has begun.
    """
    names = names_of([*folders, *behind])
    runs = [_read_run(folder, name) for folder, name in zip(folders, names, strict=False)]
    for folder, name in zip(behind, names[len(folders) :], strict=True):
        try:
            runs.append(_read_run(folder, name))
        except UserError as error:
            say(f"the report leaves out the curves of {folder}: {error}")
    return runs


def names_of(folders: Sequence[Path]) -> list[str]:
    """The end of each path that sets it apart from the others. Raises UserError for a folder that is named twice."""
    places = [folder.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"{folders[index]} is named twice; name each folder once")
    length = 1
    while len({place.parts[-length:] for place in places}) < len(places):
        length += 1
    return ["/".join(place.parts[-length:]) for place in places]


def runs_behind(models: Iterable[str], known: Sequence[Path] = ()) -> list[Path]:
    """The folders of the training runs that made some models, if they are on this machine.

    Args:
        models: folders or Hub ids. A run keeps its tuned model in RUN/model.
        known: runs to leave out.
    """
    taken = {folder.resolve() for folder in known}
    found: dict[Path, Path] = {}
    for model in models:
        run = Path(model).resolve().parent
        begun = (run / "run.json").is_file() and (run / "log.jsonl").is_file()
        if Path(model).name == "model" and begun and run not in taken:
            found[run] = Path(model).parent
    return list(found.values())


def group_runs(runs: Sequence[TrainingRun]) -> list[Group]:
    """Group the runs that differ only by their seed.

    Runs that share their seed, too, are not independent samples: the second one starts another group.
    """
    members: list[list[TrainingRun]] = []
    for run in runs:
        seed = run.recipe["seed"]
        for group in members:
            if not _changed(group[0], run) and seed not in [other.recipe["seed"] for other in group]:
                group.append(run)
                break
        else:
            members.append([run])
    names: list[str] = []
    for group in members:
        first = group[0].name
        without_seed = re.sub(r"[-_. /]*(seed|s)?[-_. /]*\d+$", "", first) if len(group) > 1 else first
        choices = (without_seed, first, f"{first} ({len(names) + 1})")
        names.append(next(name for name in choices if name and name not in names))
    return [Group(name, tuple(group)) for name, group in zip(names, members, strict=True)]


def differences(groups: Sequence[Group]) -> dict[str, Record]:
    """The value in each group of every option that differs; `model` and `data` also go by their hashes.

    What the figures compare with sets runs apart, too, as `reference`.
    """
    keys = dict.fromkeys(key for group in groups[1:] for key in _changed(groups[0].runs[0], group.runs[0]))
    return {key: {group.name: _value(group.runs[0], key) for group in groups} for key in keys}


def compare_groups(groups: Sequence[Group]) -> list[Record]:
    """Scores at the numbers of tokens at which at least two runs were scored.

    Returns:
        Records with ``tokens``, ``saved_model`` (scores of saved models, not of models in training) and ``groups``: by
        name the number ``n`` of runs, mean and standard deviation of each of `METRICS`, ``documents``, and for a single
        run the intervals over documents. None stands for what is not known of all runs.
    """
    found: dict[tuple[int, bool], dict[str, list[Scores]]] = {}
    for group in groups:
        for run in group.runs:
            scores = [((line.tokens, False), line.validation) for line in run.scored]
            saved = [((run.tokens, True), run.record.evaluation)] if run.record.evaluation else []
            for place, score in scores + saved:
                found.setdefault(place, {}).setdefault(group.name, []).append(score)
    return [
        {
            "tokens": tokens,
            "saved_model": is_saved,
            "groups": {name: _group_scores(scores) for name, scores in by_group.items()},
        }
        for (tokens, is_saved), by_group in sorted(found.items())
        if sum(map(len, by_group.values())) > 1
    ]


def _group_scores(scores: Sequence[Scores]) -> Record:
    documents, only = {score.documents for score in scores}, scores[0] if len(scores) == 1 else None
    return {
        "n": len(scores),
        **{metric: spread(getattr(score, metric) for score in scores) for metric in METRICS},
        "documents": documents.pop() if len(documents) == 1 else None,
        "ratio_interval": only and only.ratio_interval,
        "kl_interval": only and only.kl_interval,
    }


def reference_words(groups: Sequence[Group]) -> tuple[str, str]:
    """`in_words` for the reference of all runs."""
    return in_words(run.reference for group in groups for run in group.runs if run.compares)


def spread(values: Iterable[float | None]) -> Record | None:
    """Mean and sample standard deviation (None for one value); None where a value is missing."""
    numbers = list(values)
    if None in numbers or not numbers:
        return None
    return {"mean": statistics.fmean(numbers), "std": statistics.stdev(numbers) if len(numbers) > 1 else None}


def _changed(one: TrainingRun, other: TrainingRun) -> list[str]:
    """Options, other than the seed, in which two runs differ."""
    named = [key for key in ("model", "data") if getattr(one.record, key) != getattr(other.record, key)]
    named += ["reference"] if one.reference != other.reference else []
    return named + [key for key in changed_options(one.recipe, other.recipe) if key != "seed"]


def _value(run: TrainingRun, key: str) -> Any:
    if key == "reference":
        return REFERENCES[run.reference]
    if key in ("model", "data"):
        # Two folders may have the same name at different times, so the hash says what the name does not.
        name = run.recipe["model"] if key == "model" else run.recipe["data"]["mixture"]
        text = json.dumps(run.record.data, sort_keys=True)
        sha256 = run.record.model.sha256 if key == "model" else hashlib.sha256(text.encode()).hexdigest()
        return f"{name} ({sha256[:8]})"
    steps = key.split(".")
    return reduce(lambda value, name: value.get(name) if isinstance(value, dict) else None, steps, run.recipe)


def _read_run(folder: Path, name: str) -> TrainingRun:
    if not (folder / "run.json").is_file():
        fault = "holds no run.json" if folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {fault}; name a folder that moh-llm train made")
    record = RunRecord.read(folder / "run.json")
    if not {"model", "output_dir", "max_steps"} <= record.config.keys():
        raise UserError(f"{folder / 'run.json'} is not the record of a training run; name another folder")
    defaults = json.loads(json.dumps(asdict(TrainConfig(model="-", output_dir="-", max_steps=10**9))))
    recipe = _with_defaults(record.config, defaults)
    lines, cut = _read_log(folder / "log.jsonl")
    for line in lines:
        if line.tokens is None:
            line.tokens = line.step * recipe["data"]["batch_size"] * recipe["data"]["sequence_length"]
    return TrainingRun(name, folder, record, recipe, lines, cut)


def _with_defaults(recorded: Record, defaults: Record) -> Record:
    filled = defaults | recorded
    for name, value in defaults.items():
        if isinstance(value, dict) and isinstance(filled[name], dict):
            filled[name] = _with_defaults(filled[name], value)
    return filled


def _read_log(path: Path) -> tuple[list[LogLine], bool]:
    """The log's lines, and whether an incomplete last one is left out."""
    try:
        texts = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); wait for the run's first step, or start it") from error
    lines: list[LogLine] = []
    for number, text in enumerate(texts, start=1):
        where = f"{path}: line {number}"
        try:
            lines += [LogLine.parse(parse_json(text, where), where)] if text.strip() else []
        except UserError as error:
            # Complete lines end in a line feed, so what follows the last one may be half a line.
            if number < len(texts):
                raise UserError(f"{error}; resume the run, which cuts the log there, or remove the line") from error
    if not lines:
        raise UserError(f"{path} holds no step yet; wait for the run's first one")
    return lines, len(lines) < sum(bool(text.strip()) for text in texts)
