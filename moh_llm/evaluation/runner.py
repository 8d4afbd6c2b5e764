"""Running a suite with lm-eval on one model after another.

    scores = score({"base": "path/to/base", "model": "out/moh"}, load_suite("paper"), data_dir=Path("benchmarks"))

Data is read once and before any model. Each benchmark is its own lm-eval run with the seeds of lm-eval's command, so
that one which fails loses only itself, and the numbers are those of that command.
"""

import gc
import json
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
from moh_llm.devices import choose_device, empty_cache, name_device
from moh_llm.devices import compute_dtype as choose_dtype
from moh_llm.errors import UserError
from moh_llm.evaluation import statistics
from moh_llm.evaluation.models import stored_dtype
from moh_llm.evaluation.processes import AnswerCache, Answers, BenchmarkError, Team, connect
from moh_llm.evaluation.suite import Suite
from moh_llm.evaluation.tasks import SEEDS, Loaded, items_of, load_tasks, quiet, require_lm_eval
from moh_llm.files import write_text
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
    """Also of an earlier run, for the answers that were kept."""
    truncated: bool
    """Whether some prompt was longer than the model's context and lost its beginning."""
    batch_size: int
    """Sequences in a forward pass, on each process."""

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
    stored_dtype: str = ""
    chances: dict[str, statistics.Strata | None] = field(default_factory=dict)
    """Chance score of each item, by benchmark (`Loaded.chances`)."""
    records: FolderRecords | None = None
    """The records of a folder; None for a model on the Hub."""
    attention_backend: str | None = None


def score(
    models: dict[str, str],
    suite: Suite,
    data_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int | str = 8,
    compute_dtype: str = "auto",
    device: str | None = None,
    say: Callable[[str], None] = say_aside,
    cache: AnswerCache | None = None,
    log_samples: bool = False,
    share_prefixes: bool = False,
) -> dict[str, ModelScores]:
    """Score each of ``models`` (label to path or Hub id) on ``suite``, one model in memory at a time.

    Options are those of `EvaluationConfig`. ``say`` receives lines of progress on the first process. ``cache`` keeps
    answers, and with ``log_samples`` the log of every item. Under `accelerate launch` or torchrun each process answers
    its part of the requests, and all return everything.

    Raises UserError for data or a model that cannot be used; a benchmark that fails is in `ModelScores.errors`.
    """
    require_lm_eval()
    team = connect()
    say = say if team.rank == 0 else lambda line: None
    if device is not None and team.size > 1:
        raise UserError(
            f"--device {device}: each of {team.size} processes has a device of its own; leave --device out "
            "(for the CPU hide the GPUs: CUDA_VISIBLE_DEVICES=)"
        )
    device = str(choose_device(device))
    dtype = team.broadcast(lambda: str(choose_dtype(choose_device(device), compute_dtype)).removeprefix("torch."))
    results = team.broadcast(
        lambda: {label: _identify(label, model, dtype, device, say) for label, model in models.items()}
    )
    stored = ", ".join(f"{label} {result.stored_dtype}" for label, result in results.items())
    rule = "auto on this device" if compute_dtype == "auto" else "as asked"
    say(f"compute dtype: {dtype} for every model, {rule} (stored in: {stored})")
    with tempfile.TemporaryDirectory(prefix="moh-eval-") as folder:
        say(f"reading the data of {len(suite.benchmarks)} benchmarks")
        loaded = team.barrier(lambda: load_tasks(suite, Path(folder), data_dir, limit))
        progress = Progress(len(models) * sum(one.items(limit) for one in loaded))
        for label, result in results.items():
            say(f"loading {label}: {result.model}")
            lm = _load(result, batch_size, share_prefixes, cache, team)
            if lm.answers.known:
                say(f"{label}: {len(lm.answers.known):,} answers are kept from an earlier run")
            for number, one in enumerate(loaded, start=1):
                name = one.benchmark.name
                where = f"[{number}/{len(loaded)}] {label}: {name}"
                result.data[name], result.chances[name] = one.data, one.chances
                try:
                    found, samples = run_benchmark(lm, one, limit)
                except BenchmarkError as error:
                    result.errors[name] = str(error)
                    progress.add(one.items(limit), None)
                    say(f"{where} failed")
                    continue
                if cache is not None and log_samples:
                    team.broadcast(partial(_write_log, cache.samples_file(label, name), samples))
                result.scores[name] = found
                progress.add(found.items, found.seconds)
                left = f"; about {spell_seconds(progress.seconds_left)} left" if progress.seconds_left else ""
                figure = f"{100 * statistics.mean(found.strata):.1f}"
                say(f"{where} {figure} ({found.items} items, {spell_seconds(found.seconds)}{left})")
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
    return ModelScores(model, identify(model), dtype, device, stored_dtype=stored_dtype(model), records=records)


def _load(
    result: ModelScores, batch_size: int | str, share_prefixes: bool, cache: AnswerCache | None, team: Team
) -> "LanguageModel":
    """Load a model with the answers that an earlier run left, and note how it is run in ``result``."""
    from moh_llm.attention import choose_for
    from moh_llm.evaluation.language_model import load_model

    names = team.gather(name_device(choose_device(result.device)))
    result.hardware = " + ".join(dict.fromkeys(names))
    key = {
        "model": result.identity.sha256,
        "dtype": result.dtype,
        "hardware": result.hardware,
        "share_prefixes": share_prefixes,
        "versions": installed_versions(),
    }
    answers = cache.open(key, team) if cache else Answers()
    lm = team.barrier(
        lambda: load_model(
            *(result.model, batch_size, result.dtype, result.device, team, result.identity.revision),
            *(answers, share_prefixes),
        )
    )
    result.context = lm.max_length
    if lm.config.model_type == MODEL_TYPE:
        result.attention_backend = choose_for(lm.device, lm.model.dtype, lm.config.head_dim).name
    return lm


def run_benchmark(lm: "LanguageModel", loaded: Loaded, limit: int | None) -> tuple[Score, list[Sample]]:
    """Run one benchmark's tasks through lm-eval; returns the score of every item, and the items as lm-eval logs them.

    Raises BenchmarkError, on every process, when one fails.
    """
    from lm_eval import evaluate  # `simple_evaluate` lists the machine's packages after every call, for six seconds

    start, tasks = time.perf_counter(), {task.config.task: task for task in loaded.tasks}
    lm.answers.start()
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
    cut, batch_sizes, earlier = zip(*lm.gather((lm.answers.cut, lm.batch_size, lm.answers.seconds)), strict=True)
    seconds = time.perf_counter() - start + earlier[0]
    return Score(strata, figures, seconds, any(cut), min(batch_sizes)), samples


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
        name, items = task.config.task, items_of(task, limit)
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
        samples += [_log_item(name, sample, value) for sample, value in zip(found, values, strict=True)]
    if benchmark.average == "parts":
        strata = statistics.average_readings(strata)
    return strata, figures, samples


def _log_item(task: str, sample: Any, score: float) -> Sample:
    """One item of the log."""
    prompt = sample["arguments"][0][0]
    responses = []
    for (context, *rest), said, kept in zip(
        sample["arguments"], sample["resps"], sample["filtered_resps"], strict=True
    ):
        if rest and isinstance(rest[0], str):
            response = {"continuation": rest[0], "log_likelihood": _number(said[0][0]), "greedy": bool(said[0][1])}
        elif rest:
            response = {"text": said[0], "answer": kept}
        else:
            response = {"log_likelihood": _number(said[0])}
        # WinoGrande and its like have a prompt for each choice.
        responses.append(response if context == prompt else {"prompt": context, **response})
    return {
        "task": task,
        "doc_id": sample["doc_id"],
        "prompt_hash": sample["prompt_hash"],
        "prompt": prompt,
        "responses": responses,
        "target": sample["target"],
        "score": score,
    }


def _write_log(file: Path, samples: list[Sample]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {file.parent}: {error.strerror}; name another --output") from error
    write_text(file, "".join(json.dumps(sample, ensure_ascii=False, default=str) + "\n" for sample in samples))


def _number(value: float) -> float | str:
    """The number; as text where JSON cannot hold it."""
    return float(value) if math.isfinite(value) else str(float(value))


class Progress:
    """The time that is left, from the seconds of the items that are done."""

    def __init__(self, items: int) -> None:
        self._left, self._done, self._seconds = items, 0, 0.0

    def add(self, items: int, seconds: float | None) -> None:
        """Note a benchmark as done in ``seconds``; None for one that failed."""
        self._left -= items
        if seconds is not None:
            self._done, self._seconds = self._done + items, self._seconds + seconds

    @property
    def seconds_left(self) -> float:
        return self._left * self._seconds / self._done if self._done else 0.0


def spell_seconds(seconds: float) -> str:
    """``8 s``, ``14 min`` or ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def installed_versions() -> dict[str, str]:
    """The versions that scores depend on."""
    names = {"torch": "torch", "transformers": "transformers", "lm_eval": "lm-eval", "datasets": "datasets"}
    return {
        "moh_llm": __version__,
        **{name: metadata.version(package) for name, package in names.items()},
        "python": platform.python_version(),
    }
