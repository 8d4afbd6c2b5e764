"""One benchmark on one loaded model, through lm-eval: the score of every item, and its log."""

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moh_llm.data.tokenizer import open_tokenizer, rows_beside, tokens_without_rows
from moh_llm.errors import UserError
from moh_llm.evaluation import statistics
from moh_llm.evaluation.processes import Team
from moh_llm.evaluation.tasks import Loaded, items_of

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

# lm-eval's own defaults, written out so that the report can state them.
SEEDS = {"python": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}

_TEXTS = 1024  # in one call of a tokenizer

Sample = dict[str, Any]


class BenchmarkError(Exception):
    """A benchmark could not be scored. The message is the error of the first process that failed."""


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
    batch_size: int
    """Sequences in a forward pass, on each process."""

    @property
    def items(self) -> int:
        """How many items were scored."""
        return sum(len(values) for values in self.strata)


@dataclass
class _Share:
    """Results of one process: for each task the items' numbers, scores and records."""

    tasks: dict[str, list[tuple[int, float, Sample | None]]]
    truncated: bool
    batch_size: int


def run_benchmark(
    lm: "HFLM", loaded: Loaded, limit: int | None, team: Team, log_samples: bool = False
) -> tuple[Score, list[Sample]]:
    """Run one benchmark's tasks through lm-eval and keep the score of every item, and with ``log_samples`` its record.

    The seeds are those of lm-eval's command, set anew for each benchmark, so a benchmark's examples and
    numbers do not depend on which others run. Raises BenchmarkError, on every process, when one fails.
    """
    start = time.perf_counter()
    share, problem = None, None
    try:
        share = _score_own_items(lm, loaded, limit, team, log_samples)
    except Exception as error:
        # One benchmark must not lose hours of the others; the traceback still reaches the screen.
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    handed_in = team.gather((share, problem))
    if problems := [problem for _, problem in handed_in if problem]:
        raise BenchmarkError(problems[0])
    return _put_together(loaded, limit, [share for share, _ in handed_in if share], time.perf_counter() - start)


def _score_own_items(lm: "HFLM", loaded: Loaded, limit: int | None, team: Team, log_samples: bool) -> _Share:
    """Run lm-eval over the items of this process."""
    import random

    import numpy as np
    import torch

    # Not `simple_evaluate`: it lists the machine's packages after every call, about six seconds each.
    from lm_eval import evaluate

    random.seed(SEEDS["python"])
    np.random.seed(SEEDS["numpy"])
    torch.manual_seed(SEEDS["torch"])
    tasks = {task.config.task: task for task in loaded.tasks if team.rank < items_of(task, limit)}
    for task in tasks.values():
        task.set_fewshot_seed(SEEDS["fewshot"])
    share = _Share({task.config.task: [] for task in loaded.tasks}, False, lm.batch_size)
    if not tasks:
        return share
    with _only_own_items(list(tasks.values()), team), _watch_truncation() as truncated:
        # Standard errors come from the items (`statistics`); lm-eval would bootstrap perplexities too.
        results: Any = evaluate(lm, {"tasks": tasks, "groups": {}}, limit=limit, bootstrap_iters=0)
    benchmark = loaded.benchmark
    for name in tasks:
        for sample in results["samples"][name]:
            if sample["filter"] == benchmark.filter:
                value = float(sample[benchmark.metric])
                share.tasks[name].append(
                    (sample["doc_id"], value, _record(name, sample, value) if log_samples else None)
                )
    share.truncated, share.batch_size = bool(truncated), lm.batch_size
    return share


@contextlib.contextmanager
def _only_own_items(tasks: "list[ConfigurableTask]", team: Team) -> Iterator[None]:
    """Let lm-eval see, of each task, only the items that this process scores.

    lm-eval's own distribution draws the examples of a prompt from one sequence per process, so that prompts
    and scores depend on the number of processes. Here every process builds the prompts of all items, as a
    single one would, and keeps its own.
    """
    if team.size > 1:
        for task in tasks:
            task.build_all_requests = _own_requests(task, team)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for task in tasks:
            vars(task).pop("build_all_requests", None)
            vars(task).pop("doc_iterator", None)


def _own_requests(task: "ConfigurableTask", team: Team) -> Callable[..., None]:
    build, iterate = task.build_all_requests, task.doc_iterator

    def build_own(**arguments: Any) -> None:
        build(**arguments)
        task._instances = [request for request in task.instances if request.doc_id % team.size == team.rank]
        # From here on lm-eval goes through the items to score them.
        task.doc_iterator = lambda **which: (  # type: ignore[method-assign]
            (number, item) for number, item in iterate(**which) if number % team.size == team.rank
        )

    return build_own


def check_rows(model: str, benchmarks: Sequence[Loaded], limit: int | None) -> None:
    """Raise UserError where the text of a benchmark holds a token without a row in the embedding of ``model``.

    Only tokenizers that have such tokens read the text here. A benchmark whose requests cannot be built is left to
    `run_benchmark`.
    """
    if (rows := rows_beside(model)) is None:
        return
    tokenizer = open_tokenizer(model)
    if not set(tokens_without_rows(tokenizer, rows)) - {tokenizer.pad_token}:
        return
    for loaded in benchmarks:
        texts = list(dict.fromkeys(text for task in loaded.tasks for text in _texts(task, limit)))
        for start in range(0, len(texts), _TEXTS):
            encoded = tokenizer(texts[start : start + _TEXTS], verbose=False)["input_ids"]
            if (largest := max((max(ids) for ids in encoded if ids), default=-1)) >= rows:
                raise UserError(
                    f"{model}: the text of benchmark {loaded.benchmark.name} holds the token "
                    f"{tokenizer.convert_ids_to_tokens(largest)[:40]!r} (id {largest}), and the model embeds ids below "
                    f"vocab_size={rows}; remove the token from its tokenizer, or give it a row: moh-llm convert BASE "
                    "--tokenizer FOLDER"
                )


def _texts(task: "ConfigurableTask", limit: int | None) -> list[str]:
    """What is tokenised of each request of a task: its prompt, and prompt and continuation together."""
    task.set_fewshot_seed(SEEDS["fewshot"])
    with contextlib.suppress(Exception), _watch_truncation():
        task.build_all_requests(limit=limit)
        parts = [[part for part in request.args if isinstance(part, str)] for request in task.instances]
        return [text for part in parts for text in (part[0], "".join(part))]
    return []


def _put_together(
    loaded: Loaded, limit: int | None, shares: list[_Share], seconds: float
) -> tuple[Score, list[Sample]]:
    """The shares of all processes as one score, items in their own order."""
    strata: statistics.Strata = []
    figures: dict[str, tuple[float, int]] = {}
    samples: list[Sample] = []
    benchmark = loaded.benchmark
    for task in loaded.tasks:
        name = task.config.task
        items = sorted((item for share in shares for item in share.tasks[name]), key=lambda item: item[0])
        if [number for number, _, _ in items] != list(range(items_of(task, limit))):
            raise BenchmarkError(f"{name}: {len(items)} of {items_of(task, limit)} items came back")
        values = [value for _, value, _ in items]
        if odd := [number for number, value, _ in items if not math.isfinite(value)]:
            raise BenchmarkError(
                f"{name}: {len(odd)} item(s) have no number as score, item {odd[0]} first; "
                "--compute-dtype float32 may help"
            )
        strata.append(values)
        figures[name] = (float(task.aggregation()[benchmark.metric](values)), len(values))
        samples += [sample for _, _, sample in items if sample is not None]
    if benchmark.average == "parts":
        strata = statistics.average_readings(strata)
    truncated, batch_size = any(share.truncated for share in shares), min(share.batch_size for share in shares)
    return Score(strata, figures, seconds, truncated, batch_size), samples


def _record(task: str, sample: Any, score: float) -> Sample:
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


def _number(value: float) -> float | str:
    """The number; as text where JSON cannot hold it."""
    return float(value) if math.isfinite(value) else str(float(value))


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
