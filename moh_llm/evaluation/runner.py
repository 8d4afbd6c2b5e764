"""Running a suite with lm-eval on one model after another.

    options = EvaluationConfig("out/moh", base="path/to/base", data_dir="benchmarks")
    scores = score({"base": "path/to/base", "model": "out/moh"}, load_suite("paper"), options)

Data is read once and before any model. Each benchmark is its own lm-eval run with the seeds of lm-eval's command, so
that one which fails loses only itself, and the numbers are those of that command.
"""

import dataclasses
import gc
import math
import platform
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm import __version__
from moh_llm.auto_classes import MODEL_TYPE
from moh_llm.devices import choose_device, compute_dtype, empty_cache, name_device
from moh_llm.errors import UserError
from moh_llm.evaluation import statistics
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.processes import BenchmarkError, Finished, Team, connect
from moh_llm.evaluation.suite import Suite
from moh_llm.evaluation.tasks import SEEDS, Loaded, hash_definition, load_tasks, quiet
from moh_llm.records.identity import FolderRecords, Identity, identify, read_records
from moh_llm.terminal import say_aside

if TYPE_CHECKING:
    from moh_llm.evaluation.language_model import LanguageModel

Sample = dict[str, Any]


@dataclass
class Score:
    """One benchmark on one model."""

    strata: statistics.Strata
    """Item scores from 0 to 1, one list per lm-eval task (one list in all where readings are averaged)."""
    tasks: dict[str, tuple[float, int]]
    """lm-eval's own figure and number of items for each task."""
    seconds: float
    truncated: bool
    """Whether some prompt was longer than the model's context and lost its beginning."""

    @property
    def items(self) -> int:
        """How many items were scored."""
        return sum(len(values) for values in self.strata)


@dataclass
class ModelScores:
    """One model on the whole suite: a score or an error for each benchmark."""

    model: str
    identity: Identity
    dtype: str = ""
    """Dtype that it was computed in."""
    device: str = ""
    context: int = 0
    """Longest input in tokens."""
    scores: dict[str, Score] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each benchmark's data (`Loaded.data`)."""
    hardware: str = ""
    chances: dict[str, statistics.Strata | None] = field(default_factory=dict)
    """Chance score of each item, by benchmark (`Loaded.chances`)."""
    records: FolderRecords | None = None
    """The records of a folder; None for a model on the Hub."""
    attention_backend: str | None = None


def score(
    models: dict[str, str],
    suite: Suite,
    options: EvaluationConfig,
    say: Callable[[str], None] = say_aside,
    finished: Finished | None = None,
) -> dict[str, ModelScores]:
    """Score each of ``models`` (label to path or Hub id) on ``suite``, one model in memory at a time.

    ``say`` receives lines of progress on the first process. ``finished`` has the benchmarks of an earlier run and keeps
    those of this one, with ``options.log_samples`` their items, too. Under `accelerate launch` or torchrun each process
    answers its part of the requests, and all return everything.

    Raises UserError for data or a model that cannot be used; a benchmark that fails is in `ModelScores.errors`.
    """
    team = connect()
    say = say if team.rank == 0 else lambda line: None
    if options.device is not None and team.size > 1:
        raise UserError(
            f"--device {options.device}: each of {team.size} processes has a device of its own; leave --device out "
            "(for the CPU hide the GPUs: CUDA_VISIBLE_DEVICES=)"
        )
    device, asked = str(choose_device(options.device)), options.compute_dtype
    dtype = team.broadcast(lambda: str(compute_dtype(choose_device(device), asked)).removeprefix("torch."))
    results = team.broadcast(
        lambda: {label: _identify(label, model, dtype, device, say) for label, model in models.items()}
    )
    with tempfile.TemporaryDirectory(prefix="moh-eval-") as folder:
        say(f"reading the data of {len(suite.benchmarks)} benchmarks")
        loaded = team.barrier(lambda: load_tasks(suite, Path(folder), options.data_dir, options.limit))
        for label, result in results.items():
            say(f"loading {label}: {result.model}")
            lm = _load(result, options.batch_size, team)
            for number, one in enumerate(loaded, start=1):
                name = one.benchmark.name
                where = f"[{number}/{len(loaded)}] {label}: {name}"
                result.data[name], result.chances[name] = one.data, one.chances
                key = _key(result, suite, one, options)
                known = team.broadcast(partial(finished.read, label, name, key)) if finished else None
                if known is not None:
                    result.scores[name] = Score(**known)
                    say(f"{where} is kept from an earlier run")
                    continue
                try:
                    found, items = run_benchmark(lm, one, options.limit)
                except BenchmarkError as error:
                    result.errors[name] = str(error)
                    say(f"{where} failed")
                    continue
                if finished is not None:
                    kept = items if options.log_samples else []
                    team.broadcast(partial(finished.write, label, name, key, dataclasses.asdict(found), kept))
                result.scores[name] = found
                say(f"{where} {100 * statistics.mean(found.strata):.1f} ({found.items} items, {found.seconds:.0f} s)")
            # In this order: the next model needs the memory.
            del lm
            gc.collect()
            empty_cache()
    return results


def _identify(label: str, model: str, dtype: str, device: str, say: Callable[[str], None]) -> ModelScores:
    """Hash a model and read the records of a folder; say if they are not of the model in it."""
    records = read_records(Path(model)) if Path(model).is_dir() else None
    for line in records.lines(f"{label} ({model})") if records else ():
        say(line)
    return ModelScores(model, identify(model), dtype, device, records=records)


def _load(result: ModelScores, batch_size: int | str, team: Team) -> "LanguageModel":
    """Load a model, and note how it is run in ``result``."""
    from moh_llm.attention import choose_for
    from moh_llm.evaluation.language_model import load_model

    names = team.gather(name_device(choose_device(result.device)))
    result.hardware = " + ".join(dict.fromkeys(names))
    how = (batch_size, result.dtype, result.device, team, result.identity.revision)
    lm = team.barrier(lambda: load_model(result.model, *how))
    result.context = lm.max_length
    if lm.config.model_type == MODEL_TYPE:
        result.attention_backend = choose_for(lm.device, lm.model.dtype, lm.config.head_dim).name
    return lm


def _key(result: ModelScores, suite: Suite, loaded: Loaded, options: EvaluationConfig) -> dict[str, Any]:
    """What the scores of a benchmark depend on. Batch size and number of processes change them by rounding alone."""
    return {
        "model": result.identity.sha256,
        "dtype": result.dtype,
        "hardware": result.hardware,
        "versions": installed_versions(),
        "benchmark": dataclasses.asdict(loaded.benchmark),
        "definition": hash_definition(suite, loaded.benchmark),
        "data": loaded.data,
        "limit": options.limit,
        "log_samples": options.log_samples,
    }


def run_benchmark(lm: "LanguageModel", loaded: Loaded, limit: int | None) -> tuple[Score, list[Sample]]:
    """Run one benchmark's tasks through lm-eval; returns the score of every item, and the items as lm-eval logs them.

    Raises BenchmarkError, on every process, when one fails.
    """
    from lm_eval import evaluate  # `simple_evaluate` lists the machine's packages after every call, for six seconds

    start, tasks = time.perf_counter(), {task.config.task: task for task in loaded.tasks}
    lm.cut = False
    try:
        set_seeds(loaded)
        with quiet():
            # Standard errors come from the items (`statistics`); lm-eval would bootstrap perplexities too.
            results: Any = evaluate(lm, {"tasks": tasks, "groups": {}}, limit=limit, bootstrap_iters=0)
        strata, figures, samples = _collect(loaded, limit, results["samples"])
    except BenchmarkError:  # of all processes
        raise
    except Exception as error:
        # One benchmark must not lose hours of the others; the traceback still reaches the screen.
        traceback.print_exc()
        lm.gather(None, f"{type(error).__name__}: {error}")
    return Score(strata, figures, time.perf_counter() - start, any(lm.gather(lm.cut))), samples


def set_seeds(loaded: Loaded) -> None:
    """Set the seeds of lm-eval's command, so that examples and numbers do not depend on other benchmarks."""
    import numpy as np
    import torch

    random.seed(SEEDS["python"])
    np.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])
    for task in loaded.tasks:
        task.set_fewshot_seed(SEEDS["fewshot"])


def _collect(
    loaded: Loaded, limit: int | None, logged: dict[str, list[Any]]
) -> tuple[statistics.Strata, dict[str, tuple[float, int]], list[Sample]]:
    """Item scores, each task's own figure, and the benchmark's items in their order, from all that lm-eval logged."""
    strata, figures, samples = [], {}, []
    benchmark = loaded.benchmark
    for task in loaded.tasks:
        name = task.config.task
        items = min(limit or len(task.task_docs), len(task.task_docs))
        found = [sample for sample in logged[name] if sample["filter"] == benchmark.filter]
        found.sort(key=lambda sample: sample["doc_id"])
        if [sample["doc_id"] for sample in found] != list(range(items)):
            raise ValueError(f"{name}: {len(found)} of {items} items came back")
        values = [float(sample[benchmark.metric]) for sample in found]
        if odd := [number for number, value in enumerate(values) if not math.isfinite(value)]:
            raise ValueError(
                f"{name}: {len(odd)} item(s) have no number as score, item {odd[0]} first; "
                "--compute-dtype float32 may help"
            )
        strata.append(values)
        figures[name] = (float(task.aggregation()[benchmark.metric](values)), items)
        samples += [{"task": name, **sample, "score": value} for sample, value in zip(found, values, strict=True)]
    if benchmark.average == "parts":
        strata = statistics.average_readings(strata)
    return strata, figures, samples


def installed_versions() -> dict[str, str]:
    """The versions that scores depend on."""
    names = {"torch": "torch", "transformers": "transformers", "lm_eval": "lm-eval", "datasets": "datasets"}
    return {
        "moh_llm": __version__,
        **{name: metadata.version(package) for name, package in names.items()},
        "python": platform.python_version(),
    }
