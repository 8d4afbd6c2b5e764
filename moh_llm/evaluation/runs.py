"""A training run: what its folder holds, also while training goes on, and the tables of reports and model cards.

run = read_run(Path("out/recovery"))
run.points("loss")      # [(training tokens, loss), ...]
held_out_table(run)
"""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.evaluation.rendering import Table, facts
from moh_llm.intervals import show_figure, show_number
from moh_llm.records.conversion import REFERENCES, ReferenceKind
from moh_llm.records.run import LogLine, Routing, RunRecord, Scores, read_log

Pairs = list[tuple[str, str]]
_DROPPED = 10  # dropped steps that are listed one by one
_SCORES = 12  # rows of `held_out_table`; more are thinned out
_SOURCES = 40  # rows of `receipt`; the others are summed up


@dataclass(frozen=True)
class TrainingRun:
    """What a run has written so far.

    Attributes:
        folder: its ``output_dir``.
        record: ``run.json``.
        lines: ``log.jsonl``.
        cut: whether the log's last line was incomplete, as a kill leaves it, and is left out.
    """

    folder: Path
    record: RunRecord
    lines: list[LogLine]
    cut: bool

    @property
    def recipe(self) -> dict[str, Any]:
        """All options of the run."""
        return self.record.config

    @property
    def tokens(self) -> int:
        """Training tokens read so far."""
        return self.lines[-1].tokens or 0

    @property
    def reference(self) -> ReferenceKind:
        """The model that ratios and KLs compare with: the base only if the record says so."""
        return self.record.reference or "start"

    @property
    def scored(self) -> list[LogLine]:
        """The lines that have scores on held-out text."""
        return [line for line in self.lines if line.validation]

    def points(self, key: str) -> list[tuple[int, float]]:
        """Training tokens and values of a number in the log, such as ``validation.kl``, without dropped steps."""
        read, found = attrgetter(key), []
        for line in self.lines:
            try:
                value = read(line)
            except AttributeError:  # this line has no such part
                continue
            if isinstance(value, int | float) and not line.dropped:
                found.append((line.tokens or 0, value))
        return found


def read_run(folder: Path) -> TrainingRun:
    """Read the training run in ``folder``. Raises UserError if there is none, or none that has begun."""
    if not (folder / "run.json").is_file():
        fault = "holds no run.json" if folder.is_dir() else "is not a folder"
        raise UserError(f"{folder} {fault}; name a folder that moh-llm train made")
    record, log = RunRecord.read(folder / "run.json"), folder / "log.jsonl"
    try:
        lines, cut = read_log(log, "resume the run, which cuts the log there, or remove the line")
    except OSError as error:
        raise UserError(f"cannot read {log} ({error.strerror}); wait for the run's first step, or start it") from error
    if not lines:
        raise UserError(f"{log} holds no step yet; wait for the run's first one")
    return TrainingRun(folder, record, lines, cut)


def run_behind(model: str | Path) -> Path | None:
    """The folder of the training run that made a model, if it is on this machine: RUN of RUN/model."""
    run = Path(model).parent
    begun = all((run / name).is_file() for name in ("run.json", "log.jsonl"))
    return run if Path(model).name == "model" and begun else None


def read_runs_behind(models: Iterable[str], say: Callable[[str], None]) -> list[TrainingRun]:
    """The training runs that made some models (folders or Hub ids), without those that cannot be read."""
    runs = []
    for folder in dict.fromkeys(filter(None, map(run_behind, models))):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            say(f"the report leaves out the training run in {folder}: {error}")
    return runs


# ---- tables


def run_table(run: TrainingRun) -> Table:
    """The facts of a run: its folder, status, recipe, speed and losses."""
    mixture, status = run.recipe["data"]["mixture"], run.record.status
    seconds = sum(line.timing.seconds for line in run.lines if line.timing)
    pairs: Pairs = [
        ("folder", str(run.folder)),
        ("status", status if status == "finished" else f"{status}: not finished, or stopped before its end"),
        ("model", run.recipe["model"]),
        ("mixture", f"{run.record.mixture}, {mixture}" if run.record.mixture else mixture),
        *recipe(run),
        ("seconds of training", f"{seconds:,.1f}"),
    ]
    if speeds := [speed for _, speed in run.points("timing.tokens_per_second")]:
        pairs.append(("tokens per second (median)", f"{statistics.median(speeds):,.5g}"))
    if counted := [line for line in run.lines if line.loss is not None and not line.dropped]:
        marks = {"first": counted[0], "last": counted[-1], "lowest": min(counted, key=attrgetter("loss"))}
        shown = [f"{which} {line.loss:.4g} (step {line.step:,})" for which, line in marks.items()]
        pairs.append(("loss", ", ".join(shown)))
    if keys := keys_read(run):
        pairs.append(("keys", keys))
    if run.cut:
        pairs.append(("log", "the last line was cut short and is left out"))
    return facts(pairs)


def recipe(run: TrainingRun) -> Pairs:
    """How a run trained: objective, steps, weights, the options of optimizer and schedule, and the device."""
    given, data, record = run.recipe, run.recipe["data"], run.record
    dropped = [line for line in run.lines if line.dropped]
    listed = "; ".join(f"{line.step:,}: {line.dropped}" for line in dropped[:_DROPPED])
    options = {f"{group}.{key}": value for group in ("optimizer", "schedule") for key, value in given[group].items()}
    device = " ".join(filter(None, [record.device, record.device_name and f"({record.device_name})"]))
    found = {
        "objective": objective(given["objective"]["kind"], run.reference),
        "tokens": f"{run.tokens:,}",
        "steps": f"{run.lines[-1].step:,} of {given['max_steps']:,}, each {data['batch_size']} sequences of "
        f"{data['sequence_length']:,} tokens",
        "weights trained": weights_trained(run),
        **{key: _short(value) for key, value in options.items() if value is not None},
        "load-balance weight": record.balance_coefficient is not None and f"{record.balance_coefficient:g}",
        "steps dropped as diverging": dropped and f"{len(dropped):,} ({listed}{'; …' * (len(dropped) > _DROPPED)})",
        "compute dtype": record.compute_dtype,
        "seed": str(given["seed"]),
        "device": device and f"{device}, {record.processes or 1} process{'es' * ((record.processes or 1) > 1)}",
    }
    return [(name, value) for name, value in found.items() if value]


def keys_read(run: TrainingRun) -> str | None:
    """The share of keys that a run's budget plans, and what the model reads; None of a run without a budget."""
    record, scores = run.record, run.record.evaluation
    if record.keys_asked is None:
        return None
    read = {"training text": record.keys_calibrated, "held-out text": scores and scores.keys_read}
    planned = f"planned {record.keys_asked:.1%} of the base's in {run.recipe['data']['sequence_length']:,} tokens"
    return "; ".join([planned, *(f"read {share:.1%} of {text}" for text, share in read.items() if share is not None)])


def objective(kind: str, teacher: ReferenceKind) -> str:
    """An objective in words."""
    others = {"cross_entropy": "cross-entropy", "noise": "squared error to the noise"}
    return others.get(kind) or f"distillation, teacher: {REFERENCES[teacher]}"


def weights_trained(run: TrainingRun) -> str:
    """Which weights a run trained, by kind."""
    names = {"base": "the dense model", "adapters": "adapters", "routers": "routers", "fallbacks": "fallbacks"}
    counts = {kind: (run.record.parameters or {}).get(f"trained_{kind}") for kind in names}
    text = ", ".join(f"{count:,} of {names[kind]}" for kind, count in counts.items() if count) or "not on record"
    if (lora := run.recipe["lora"]) is not None:
        text += f" (LoRA of rank {lora['rank']}, merged)"
    return text


def receipt(run: TrainingRun) -> Table | None:
    """The tokens that a run read of each source so far, most first; None if the log does not have them."""
    read = run.record.data_read
    if read is None:  # the run goes on
        tokens = run.lines[-1].tokens_of_source or {}
        total = sum(tokens.values())
        read = {name: {"tokens": count, "share": count / total if total else None} for name, count in tokens.items()}
    ranked = sorted(read.items(), key=lambda item: -item[1]["tokens"])
    shown = ranked[:_SOURCES]
    if others := [entry for _, entry in ranked[_SOURCES:]]:
        sums = {key: sum(entry.get(key) or 0 for entry in others) for key in others[0] if key != "epochs"}
        shown.append((f"{len(others):,} others", sums))
    forms = {"weight": ".2%", "share": ".2%", "tokens": ",.0f", "epochs": "#.3g", "repeated_tokens": ",.0f"}
    rows = [[name, *(show_number(entry.get(key), form) for key, form in forms.items())] for name, entry in shown]
    head = ["source", "planned share", "realised share", "tokens", "epochs", "repeated tokens"]
    return Table(head, rows) if rows else None


def held_out_table(run: TrainingRun) -> Table | None:
    """Scores on held-out text over training, the saved model's last; None if the run has no scores."""
    lines, saved = run.scored, run.record.evaluation
    if len(lines) > _SCORES:
        kept = {round(index * (len(lines) - 1) / (_SCORES - 1)) for index in range(_SCORES)}
        lines = [lines[index] for index in sorted(kept)]
    rows = [[f"{line.tokens or 0:,}", *_figures(line.validation), _dead_heads(line.routing)] for line in lines]
    if saved:
        rows.append([f"{run.tokens:,} (saved model)", *_figures(saved), _dead_heads(None)])
    head = ["tokens", "documents", "perplexity", "reference's", "ratio", "KL", "same top-1 %", "keys %", "dead heads"]
    return Table(head, rows, text=0).without_empty_columns() if rows else None


def _figures(scores: Scores) -> list[str]:
    return [
        show_number(scores.documents, ","),
        show_number(scores.perplexity, "#.5g"),
        show_number(scores.reference_perplexity, "#.5g"),
        show_figure(scores.ratio, scores.ratio_interval, "#.5g"),
        show_figure(scores.kl, scores.kl_interval, "#.3g"),
        show_number(scores.top1_agreement, ".2f", 100),
        show_number(scores.keys_read, ".2f", 100),
    ]


def _dead_heads(routing: Routing | None) -> str:
    if routing is None or not any(routing.load):
        return "-"
    return f"{sum(routing.dead_heads)} of {sum(map(len, routing.load))}"


def _short(value: Any) -> str:
    """An option's value in few characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")
