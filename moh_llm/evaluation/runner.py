"""Running a suite with lm-eval on one model after another.

    scores = score({"base": "path/to/base", "model": "out/moh"}, load_suite("paper"), data_dir=Path("benchmarks"))

Data is read once and before any model. Each benchmark is its own lm-eval run, so that one which fails
loses only itself, and the numbers are those of lm-eval's own command.
"""

import contextlib
import gc
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.errors import UserError
from moh_llm.evaluation import statistics
from moh_llm.evaluation.models import register_moh
from moh_llm.evaluation.suite import Benchmark, Suite
from moh_llm.evaluation.tasks import Loaded, load_tasks, require_lm_eval

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

# lm-eval's own defaults, written out so that the report can state them.
SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}


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


@dataclass
class ModelScores:
    """One model on the whole suite: a score or an error for each benchmark."""

    model: str
    dtype: str
    device: str
    context: int
    """Longest input in tokens."""
    scores: dict[str, Score] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def score(
    models: dict[str, str],
    suite: Suite,
    data_dir: Path | None = None,
    limit: int | None = None,
    batch_size: int | str = 8,
    dtype: str = "auto",
    device: str | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> dict[str, ModelScores]:
    """Score each of ``models`` (label to path or Hub id) on ``suite``, one model in memory at a time.

    ``limit`` is the number of items per lm-eval task, ``batch_size`` a number or "auto", ``dtype`` a
    torch dtype's name or "auto" (the checkpoint's), ``device`` a torch device (default: the GPU if
    there is one). ``say`` receives one line of progress per benchmark. Raises UserError for data or a
    model that cannot be used; a benchmark that fails is recorded in `ModelScores.errors`.
    """
    require_lm_eval()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("evaluation runs in one process; start it without accelerate launch or torchrun")
    device = choose_device(device)
    with tempfile.TemporaryDirectory(prefix="moh-eval-") as folder:
        say(f"reading the data of {len(suite.benchmarks)} benchmarks")
        loaded = load_tasks(suite, Path(folder), data_dir)
        return {
            label: _score_model(label, model, loaded, limit, batch_size, dtype, device, say)
            for label, model in models.items()
        }


def choose_device(device: str | None) -> str:
    """The torch device to run on. Raises UserError for one that torch does not know or does not have."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: torch cannot use it ({str(error).splitlines()[0]})") from error
    return device


def _score_model(
    label: str,
    model: str,
    loaded: list[Loaded],
    limit: int | None,
    batch_size: int | str,
    dtype: str,
    device: str,
    say: Callable[[str], None],
) -> ModelScores:
    say(f"loading {label}: {model}")
    lm = _load_model(model, batch_size, dtype, device)
    result = ModelScores(model, str(lm.model.dtype).removeprefix("torch."), device, lm.max_length)
    for number, item in enumerate(loaded, start=1):
        name = item.benchmark.name
        try:
            result.scores[name] = run_benchmark(lm, item, limit)
        except Exception as error:
            # One benchmark must not lose hours of the others; the traceback still reaches the screen.
            traceback.print_exc()
            result.errors[name] = f"{type(error).__name__}: {error}"
            say(f"[{number}/{len(loaded)}] {label}: {name} failed")
            continue
        done = result.scores[name]
        figure = f"{100 * statistics.mean(done.strata):.1f}"
        say(f"[{number}/{len(loaded)}] {label}: {name} {figure} ({done.seconds:.0f} s)")
    del lm
    gc.collect()
    _empty_gpu_cache()
    return result


def _load_model(model: str, batch_size: int | str, dtype: str, device: str) -> "HFLM":
    from lm_eval.models.huggingface import HFLM

    register_moh()
    try:
        # A path, not a model object: with an object lm-eval makes every process repeat all the work.
        # Safetensors only: a pickle from elsewhere could run anything.
        # The backend is named because lm-eval does not know our model type.
        return HFLM(model, "causal", device=device, dtype=dtype, batch_size=batch_size, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{model} cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def run_benchmark(lm: "HFLM", loaded: Loaded, limit: int | None) -> Score:
    """Run one benchmark's tasks through lm-eval and keep the score of every item.

    The seeds are those of lm-eval's command, set anew for each benchmark, so a benchmark's examples and
    numbers do not depend on which others run.
    """
    # Not `simple_evaluate`: it lists the machine's packages after every call, about six seconds each.
    from lm_eval import evaluate

    start = time.perf_counter()
    _set_seeds()
    tasks = {task.config.task: task for task in loaded.tasks}
    for task in loaded.tasks:
        task.set_fewshot_seed(SEEDS["fewshot"])
    with _watch_truncation() as truncated:
        # Standard errors come from the items (`statistics`); lm-eval would bootstrap perplexities too.
        results = evaluate(lm, {"tasks": tasks, "groups": {}}, limit=limit, bootstrap_iters=0)
    strata, figures = _read_results(results, loaded.benchmark)
    return Score(strata, figures, time.perf_counter() - start, bool(truncated))


def _set_seeds() -> None:
    import random

    import numpy as np
    import torch

    random.seed(SEEDS["python"])
    np.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])


def _read_results(results: Any, benchmark: Benchmark) -> tuple[statistics.Strata, dict[str, tuple[float, int]]]:
    """Item scores per task in the order of the items, and lm-eval's own figure per task."""
    strata, tasks = [], {}
    for part in benchmark.expand():
        samples = [s for s in results["samples"][part.task] if s["filter"] == benchmark.filter]
        samples.sort(key=lambda sample: sample["doc_id"])
        strata.append([float(sample[benchmark.metric]) for sample in samples])
        figure = results["results"][part.task][f"{benchmark.metric},{benchmark.filter}"]
        tasks[part.task] = (float(figure), len(samples))
    return (statistics.average_readings(strata) if benchmark.average == "parts" else strata), tasks


@contextlib.contextmanager
def _watch_truncation() -> Iterator[list[str]]:
    """Collect lm-eval's warnings about cut prompts: one line in the report, not one per item on the screen."""
    logger = logging.getLogger("lm_eval")
    seen: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if "runcat" not in record.getMessage():
            return record.levelno >= logging.ERROR
        seen.append(record.getMessage())
        return False

    source = logging.getLogger("lm_eval.models.huggingface")
    level, source_level = logger.level, source.level
    source.setLevel(logging.WARNING)
    logger.setLevel(logging.ERROR)
    source.addFilter(keep)
    try:
        yield seen
    finally:
        source.removeFilter(keep)
        source.setLevel(source_level)
        logger.setLevel(level)


def _empty_gpu_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
