"""Running a suite with lm-eval on one model after another.

    scores = score({"base": "path/to/base", "model": "out/moh"}, load_suite("paper"), data_dir=Path("benchmarks"))

Data is read once and before any model. Each benchmark is its own lm-eval run, so that one which fails
loses only itself, and the numbers are those of lm-eval's own command.
"""

import gc
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.devices import choose_device
from moh_llm.errors import UserError
from moh_llm.evaluation import statistics
from moh_llm.evaluation.hardware import name_hardware
from moh_llm.evaluation.kept import Kept, Key, make_key
from moh_llm.evaluation.precision import Precision, choose_dtype
from moh_llm.evaluation.processes import Team, join
from moh_llm.evaluation.progress import Progress, spell_seconds
from moh_llm.evaluation.scoring import BenchmarkError, Score, run_benchmark
from moh_llm.evaluation.suite import Suite
from moh_llm.evaluation.tasks import Loaded, load_tasks, require_lm_eval
from moh_llm.records.model import Identity, identify

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM


@dataclass
class ModelScores:
    """One model on the whole suite: a score or an error for each benchmark."""

    model: str
    identity: Identity
    dtype: str = ""
    """What it was run in; `stored_dtype` is what its weights are stored in."""
    device: str = ""
    context: int = 0
    """Longest input in tokens."""
    scores: dict[str, Score] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each benchmark's data (`Loaded.data`)."""
    hardware: dict[str, str] = field(default_factory=dict)
    """What each benchmark was scored on: parts of a run may come from different machines."""
    stored_dtype: str = ""
    chances: dict[str, statistics.Strata | None] = field(default_factory=dict)
    """What guessing scores on each item of each benchmark (`Loaded.chances`)."""


@dataclass(frozen=True)
class _Run:
    """What all models of one call share."""

    loaded: list[Loaded]
    limit: int | None
    batch_size: int | str
    precision: Precision
    device: str
    kept: Kept | None
    log_samples: bool
    share_prefixes: bool
    team: Team
    progress: Progress
    say: Callable[[str], None]


def score(
    models: dict[str, str],
    suite: Suite,
    data_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int | str = 8,
    dtype: str = "auto",
    device: str | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    kept: Kept | None = None,
    log_samples: bool = False,
    share_prefixes: bool = False,
) -> dict[str, ModelScores]:
    """Score each of ``models`` (label to path or Hub id) on ``suite``, one model in memory at a time.

    Args:
        models: path or Hub id by label.
        suite: the benchmarks.
        data_dir: local data; None reads from the Hub.
        limit: number of items per lm-eval task; None: all.
        batch_size: sequences in a pass, on each process, or "auto".
        dtype: a torch dtype's name, or "auto"; all models are run in one (`choose_dtype`).
        device: a torch device; None: the GPU if there is one, and under a launcher each process's own.
        say: receives a line of progress per benchmark, on the first process.
        kept: where finished benchmarks are kept and looked for; None: nowhere.
        log_samples: keep the prompt, responses and score of every item; needs ``kept``.
        share_prefixes: compute what prompts begin with in common once; scores may differ by rounding.

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
    precision = team.share(lambda: choose_dtype(models, dtype))
    say(str(precision))
    with tempfile.TemporaryDirectory(prefix="moh-eval-") as folder:
        if kept is not None:
            say(f"finished benchmarks are kept in {kept.folder} until the report is written")
        say(f"reading the data of {len(suite.benchmarks)} benchmarks")
        loaded: list[Loaded] = []
        team.together(lambda: loaded.extend(load_tasks(suite, Path(folder), data_dir, limit)))
        progress = Progress(list(models), {item.benchmark.name: item.items(limit) for item in loaded})
        run = _Run(loaded, limit, batch_size, precision, device, kept, log_samples, share_prefixes, team, progress, say)
        return {label: _score_model(label, model, run) for label, model in models.items()}


def _score_model(label: str, model: str, run: _Run) -> ModelScores:
    identity = run.team.share(lambda: identify(model))
    result = ModelScores(model, identity, data={item.benchmark.name: item.data for item in run.loaded})
    result.chances = {item.benchmark.name: item.chances for item in run.loaded}
    dtype, result.stored_dtype = run.precision.dtype, run.precision.stored[label]
    keys = {
        item.benchmark.name: make_key(identity.sha256, item, run.limit, dtype, run.device, run.share_prefixes)
        for item in run.loaded
    }
    _take_up(label, result, keys, run)
    missing = [(n, item) for n, item in enumerate(run.loaded, start=1) if item.benchmark.name not in result.scores]
    if not missing:
        return result
    run.say(f"loading {label}: {model}")
    lm = _load(model, identity, run)
    result.dtype, result.device = str(lm.model.dtype).removeprefix("torch."), run.device
    result.context = lm.max_length
    for number, item in missing:
        _score_benchmark(lm, label, f"[{number}/{len(run.loaded)}]", item, result, keys[item.benchmark.name], run)
    # In this order: the next model needs the memory.
    del lm
    gc.collect()
    _empty_gpu_cache()
    return result


def _load(model: str, identity: Identity, run: _Run) -> "HFLM":
    from moh_llm.evaluation.language_model import load_model

    lms: list[HFLM] = []

    def load() -> None:
        lms.append(
            load_model(
                *(model, run.batch_size, run.precision.dtype, run.device, run.team),
                *(identity.revision, run.share_prefixes),
            )
        )

    run.team.together(load)
    return lms.pop()


def _take_up(label: str, result: ModelScores, keys: dict[str, Key], run: _Run) -> None:
    """Put the scores that an earlier run kept into ``result``, and say why others are not used."""
    if run.kept is None:
        return
    kept = run.kept
    found = run.team.share(
        lambda: {name: kept.take_up(label, name, key, run.log_samples) for name, key in keys.items()}
    )
    for number, (name, old) in enumerate(found.items(), start=1):
        if isinstance(old, str):
            run.say(f"{label}: {name} is scored anew: {old}")
        elif old is not None:
            score, how = old
            result.scores[name] = score
            result.dtype, result.device, result.context = how["dtype"], how["device"], how["context"]
            result.hardware[name] = how.get("hardware", "")  # older versions did not keep it
            run.progress.done(label, name, score.seconds)
            run.say(f"[{number}/{len(keys)}] {label}: {name} {_figure(score)} (kept from an earlier run)")


def _score_benchmark(
    lm: "HFLM", label: str, number: str, item: Loaded, result: ModelScores, key: Key, run: _Run
) -> None:
    name = item.benchmark.name
    try:
        score, samples = run_benchmark(lm, item, run.limit, run.team, run.log_samples)
    except BenchmarkError as error:
        result.errors[name] = str(error)
        run.progress.done(label, name, None)
        run.say(f"{number} {label}: {name} failed")
        return
    result.scores[name] = score
    result.hardware[name] = " + ".join(dict.fromkeys(run.team.gather(name_hardware(lm.device))))
    how: dict[str, Any] = {"dtype": result.dtype, "device": result.device, "context": result.context}
    how["hardware"] = result.hardware[name]
    kept = run.kept
    if kept is not None:
        run.team.share(lambda: kept.keep(label, name, key, score, how, samples if run.log_samples else None))
    run.progress.done(label, name, score.seconds)
    left = run.progress.seconds_left()
    more = f"; about {spell_seconds(left)} left" if left else ""
    run.say(f"{number} {label}: {name} {_figure(score)} ({score.items} items, {spell_seconds(score.seconds)}{more})")


def _figure(score: Score) -> str:
    return f"{100 * statistics.mean(score.strata):.1f}"


def _empty_gpu_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
