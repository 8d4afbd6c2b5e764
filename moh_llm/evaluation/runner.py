"""Running a suite with lm-eval on one model after another.

    scores = score({"base": "path/to/base", "model": "out/moh"}, load_suite("paper"), data_dir=Path("benchmarks"))

Data is read once and before any model. Each benchmark is its own lm-eval run, so that one which fails
loses only itself, and the numbers are those of lm-eval's own command.
"""

import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moh_llm.auto_classes import MODEL_TYPE
from moh_llm.devices import choose_device, empty_cache, name_device
from moh_llm.errors import UserError
from moh_llm.evaluation import statistics
from moh_llm.evaluation.models import choose_dtype
from moh_llm.evaluation.processes import Team, join
from moh_llm.evaluation.result_cache import CachedResult, Key, ResultCache, make_key
from moh_llm.evaluation.scoring import BenchmarkError, Score, check_rows, run_benchmark
from moh_llm.evaluation.suite import Suite
from moh_llm.evaluation.tasks import Loaded, load_tasks, require_lm_eval
from moh_llm.records.folder import FolderRecords, read_records
from moh_llm.records.identity import Identity, identify
from moh_llm.terminal import say_aside


@dataclass
class ModelScores:
    """One model on the whole suite: a score or an error for each benchmark."""

    model: str
    identity: Identity
    dtype: str = ""
    """Dtype that it was computed in; `stored_dtype` is that of the stored weights."""
    device: str = ""
    context: int = 0
    """Longest input in tokens."""
    scores: dict[str, Score] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each benchmark's data (`Loaded.data`)."""
    hardware: dict[str, str] = field(default_factory=dict)
    """Hardware by benchmark: parts of a run may come from different machines."""
    stored_dtype: str = ""
    chances: dict[str, statistics.Strata | None] = field(default_factory=dict)
    """Chance score of each item, by benchmark (`Loaded.chances`)."""
    records: FolderRecords | None = None
    """The records of a folder; None for a model on the Hub."""
    attention_backend: str | None = None


@dataclass(frozen=True)
class _Run:
    """Settings and state that all models of one call share."""

    loaded: list[Loaded]
    limit: int | None
    batch_size: int | str
    cache: ResultCache | None
    log_samples: bool
    share_prefixes: bool
    team: Team
    progress: "Progress"
    say: Callable[[str], None]


def score(
    models: dict[str, str],
    suite: Suite,
    data_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int | str = 8,
    compute_dtype: str = "auto",
    device: str | None = None,
    say: Callable[[str], None] = say_aside,
    cache: ResultCache | None = None,
    log_samples: bool = False,
    share_prefixes: bool = False,
) -> dict[str, ModelScores]:
    """Score each of ``models`` (label to path or Hub id) on ``suite``, one model in memory at a time.

    Args:
        models: path or Hub id by label.
        suite: the benchmarks.
        data_dir: local data; None reads from the Hub.
        limit: number of items per lm-eval task; None: all.
        batch_size: sequences in a forward pass, on each process, or "auto".
        compute_dtype: a torch dtype's name, or "auto"; all models are computed in one (`choose_dtype`).
        device: a torch device; None: the accelerator if there is one, and under a launcher each process's own.
        say: receives a line of progress per benchmark, on the first process.
        cache: where finished benchmarks are stored and looked up; None: nowhere.
        log_samples: store the prompt, responses and score of every item; needs ``cache``.
        share_prefixes: compute common beginnings of prompts once; scores may differ by rounding.

    Under `accelerate launch` or torchrun each process scores its part of the items, and all of them return
    everything. Raises UserError for data or a model that cannot be used; a benchmark that fails is recorded
    in `ModelScores.errors`.
    """
    require_lm_eval()
    team = join()
    say = say if team.rank == 0 else lambda line: None
    if device is not None and team.size > 1:
        raise UserError(
            f"--device {device}: each of {team.size} processes has a device of its own; leave --device out "
            "(for the CPU hide the GPUs: CUDA_VISIBLE_DEVICES=)"
        )
    device = str(choose_device(device))
    precision = team.share(lambda: choose_dtype(models, compute_dtype, device))
    say(str(precision))
    with tempfile.TemporaryDirectory(prefix="moh-eval-") as folder:
        if cache is not None:
            say(f"finished benchmarks are kept in {cache.folder} until the report is written")
        identified = team.share(lambda: {label: _identify(label, model, say) for label, model in models.items()})
        say(f"reading the data of {len(suite.benchmarks)} benchmarks")
        loaded = team.agree(lambda: load_tasks(suite, Path(folder), data_dir, limit))
        team.share(lambda: [check_rows(model, loaded, limit) for model in models.values()])
        progress = Progress(list(models), {item.benchmark.name: item.items(limit) for item in loaded})
        run = _Run(loaded, limit, batch_size, cache, log_samples, share_prefixes, team, progress, say)
        results = {}
        for label, model in models.items():
            identity, records = identified[label]
            result = ModelScores(model, identity, precision.dtype, device, records=records)
            result.stored_dtype = precision.stored[label]
            _score_model(label, result, run)
            results[label] = result
        return results


def _identify(label: str, model: str, say: Callable[[str], None]) -> tuple[Identity, FolderRecords | None]:
    """Identify a model, and read the records of a folder; say where these are not of the model in it."""
    records = read_records(Path(model)) if Path(model).is_dir() else None
    for line in records.lines(f"{label} ({model})") if records else ():
        say(line)
    return identify(model), records


def _score_model(label: str, result: ModelScores, run: _Run) -> None:
    """Put the score or the error of every benchmark into ``result``; the model is loaded if one is not cached."""
    benchmarks = {item.benchmark.name: item for item in run.loaded}
    result.data = {name: item.data for name, item in benchmarks.items()}
    result.chances = {name: item.chances for name, item in benchmarks.items()}
    keys = {
        name: make_key(result.identity.sha256, item, run.limit, result.dtype, result.device, run.share_prefixes)
        for name, item in benchmarks.items()
    }
    _load_cached(label, result, keys, run)
    if not (missing := [name for name in benchmarks if name not in result.scores]):
        return
    from moh_llm.attention import choose_for
    from moh_llm.evaluation.language_model import load_model

    run.say(f"loading {label}: {result.model}")
    lm = run.team.agree(
        lambda: load_model(
            *(result.model, run.batch_size, result.dtype, result.device, run.team),
            *(result.identity.revision, run.share_prefixes),
        )
    )
    result.context = lm.max_length
    if lm.config.model_type == MODEL_TYPE:
        result.attention_backend = choose_for(lm.device, lm.model.dtype, lm.config.head_dim).name
    hardware = " + ".join(dict.fromkeys(run.team.gather(name_device(lm.device))))
    for name in missing:
        where = f"[{list(benchmarks).index(name) + 1}/{len(benchmarks)}] {label}: {name}"
        try:
            found, samples = run_benchmark(lm, benchmarks[name], run.limit, run.team, run.log_samples)
        except BenchmarkError as error:
            result.errors[name] = str(error)
            run.progress.done(label, name, None)
            run.say(f"{where} failed")
            continue
        result.scores[name], result.hardware[name] = found, hardware
        if (cache := run.cache) is not None:
            entry = CachedResult(key=keys[name], score=found, context=lm.max_length, hardware=hardware)
            logged = samples if run.log_samples else None
            run.team.share(lambda name=name, entry=entry, logged=logged: cache.store(label, name, entry, logged))
        run.progress.done(label, name, found.seconds)
        left = run.progress.seconds_left()
        more = f"; about {spell_seconds(left)} left" if left else ""
        run.say(f"{where} {_figure(found)} ({found.items} items, {spell_seconds(found.seconds)}{more})")
    # In this order: the next model needs the memory.
    del lm
    gc.collect()
    empty_cache()


def _load_cached(label: str, result: ModelScores, keys: dict[str, Key], run: _Run) -> None:
    """Put the scores that an earlier run stored into ``result``, and say why others are not used."""
    if (cache := run.cache) is None:
        return
    found = run.team.share(lambda: {name: cache.load(label, name, key, run.log_samples) for name, key in keys.items()})
    for number, (name, old) in enumerate(found.items(), start=1):
        if isinstance(old, str):
            run.say(f"{label}: {name} is scored anew: {old}")
        elif old is not None:
            result.scores[name], result.context, result.hardware[name] = old.score, old.context, old.hardware
            run.progress.done(label, name, old.score.seconds)
            run.say(f"[{number}/{len(keys)}] {label}: {name} {_figure(old.score)} (from an earlier run)")


class Progress:
    """The time that is left, from the items of each benchmark and the seconds of those that are done."""

    def __init__(self, models: list[str], items: Mapping[str, int]) -> None:
        """``items``: how many each benchmark scores on each of ``models``."""
        self._items = items
        self._open = {(model, benchmark) for model in models for benchmark in items}
        self._seconds: dict[tuple[str, str], float] = {}

    def done(self, model: str, benchmark: str, seconds: float | None) -> None:
        """Note a benchmark as done in ``seconds``; None for one that failed."""
        self._open.remove((model, benchmark))
        if seconds is not None:
            self._seconds[model, benchmark] = seconds

    def seconds_left(self) -> float | None:
        """An estimate: a benchmark takes as long as on another model, else the time per item so far. None: unknown."""
        known = sum(self._items[benchmark] for _, benchmark in self._seconds)
        if not known:
            return None if self._open else 0.0
        per_item = sum(self._seconds.values()) / known
        slowest = {name: per_item * count for name, count in self._items.items()}
        slowest |= {
            name: max(s for (_, other), s in self._seconds.items() if other == name) for _, name in self._seconds
        }
        return sum(slowest[benchmark] for _, benchmark in self._open)


def spell_seconds(seconds: float) -> str:
    """``8 s``, ``14 min`` or ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _figure(score: Score) -> str:
    return f"{100 * statistics.mean(score.strata):.1f}"
