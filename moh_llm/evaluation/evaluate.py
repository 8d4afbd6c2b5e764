"""An evaluation, from its options to its report.

    evaluation = evaluate(EvaluationConfig(["out/moh"], Path("out/report"), suite="smoke"))

Four steps: the tasks of a suite, lm-eval on every model, statistics of the scores, and the report's pages.
"""

import contextlib
import gc
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.devices import empty_cache
from moh_llm.errors import UserError
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.models import check_model, has_heads_off, label_models, load_moh
from moh_llm.evaluation.processes import Finished, connect, disconnect
from moh_llm.evaluation.record import build_record, write_samples
from moh_llm.evaluation.report import write_report
from moh_llm.evaluation.ruler import prepare
from moh_llm.evaluation.runner import score
from moh_llm.evaluation.runs import read_runs_behind
from moh_llm.evaluation.suite import Suite, load_suite
from moh_llm.evaluation.tasks import SEEDS, Loaded, load_tasks, one_line, require_lm_eval
from moh_llm.files import check_output_folder, new_folder
from moh_llm.locking import lock_folder
from moh_llm.records.evaluation import EvaluationRecord
from moh_llm.terminal import say_passing

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

ANALYSED_ITEMS = 32  # of each benchmark


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation."""

    record: EvaluationRecord
    """What ``report.json`` holds."""
    folder: Path
    """Holds ``report.html``, ``report.md`` and ``report.json``, and ``samples`` if asked for."""
    partial: Path | None
    """Folder of the finished benchmarks, kept because another one or an analysis failed; None if nothing did."""
    first_process: bool = True
    """False on the other processes of a launcher, which may return before the report is written."""

    @property
    def failed_benchmarks(self) -> list[str]:
        """Names of the benchmarks that have no score on some model."""
        return list(dict.fromkeys(error.benchmark for error in self.record.errors))


def evaluate(options: EvaluationConfig, say: Callable[[str], None] = say_passing, command_line: str = "") -> Evaluation:
    """Score models on a suite, analyse their heads, and write the report; see `moh_llm.evaluate`.

    Finished benchmarks are kept in OUTPUT.partial. Of several processes the first one writes, and its ``say`` receives
    lines of progress.

    Raises:
        UserError: an option, a model, the data or the output folder cannot be used.
    """
    # 1. The tasks of the suite, and the models by label.
    suite, models = _check(options, say)
    team = connect()
    with contextlib.ExitStack() as held:
        connection = held.enter_context(contextlib.ExitStack())
        connection.callback(disconnect)
        team.broadcast(lambda: held.enter_context(lock_folder(options.output_dir)))
        # Whoever held the lock until now may have made the folder.
        team.broadcast(lambda: check_output_folder(options.output_dir, options.overwrite))
        finished = Finished(options.output_dir.with_name(f"{options.output_dir.name}.partial"))
        # 2. lm-eval on each model.
        scores = score(models, suite, options, say, finished)
        # 3. Statistics of the scores, and what the heads did. The first process analyses; the others wait, because a
        # launcher ends all processes when one ends with an error.
        record = build_record(suite, scores, options, command_line, team.size)
        how = next((chosen.device, chosen.dtype) for chosen in scores.values())  # the same for all models
        analysed = models if options.analysis else {}
        record.analysis = team.broadcast(lambda: analyse_models(analysed, suite, options, *how, say))
        connection.close()
        if team.rank > 0:
            return Evaluation(record, options.output_dir, None, first_process=False)
        # 4. The pages, with the training runs behind the models. A run that cannot be read is left out.
        runs = read_runs_behind([about.model for about in record.models.values() if not about.changed], say)
        with new_folder(options.output_dir, options.overwrite) as folder:
            if options.log_samples:
                write_samples(folder / "samples", record, finished)
            write_report(folder, record, runs)
        if not record.errors and record.analysis == record.analyses:
            finished.remove()
            return Evaluation(record, options.output_dir, None)
        return Evaluation(record, options.output_dir, finished.folder if finished.folder.is_dir() else None)


def _check(options: EvaluationConfig, say: Callable[[str], None]) -> tuple[Suite, dict[str, str]]:
    """The suite, and the models by label. Refuses what can be refused before anything slow begins."""
    if options.samples:
        raise UserError("samples have no meaning for language models; leave them out")
    suite = load_suite(options.suite)
    models = label_models(options.models, options.base)
    reads = [path for path in (*models.values(), options.data_dir) if path]
    check_output_folder(options.output_dir, options.overwrite, reads)
    require_lm_eval()
    for model in models.values():
        check_model(model)
    return prepare(suite, list(models.values()), say), models


def analyse_models(
    models: dict[str, str], suite: Suite, options: EvaluationConfig, device: str, dtype: str, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Analyse the heads of each of ``models`` (label to path or Hub id) that has heads off, one in memory at a time.

    Returns by label the record of `moh_llm.analysis.heads.analyse`, or ``{"error": ...}``, in one line, of a model
    whose analysis failed.
    """
    from moh_llm.analysis.heads import analyse

    found: dict[str, dict[str, Any]] = {}
    texts: dict[str, list[str]] = {}
    for label, model in models.items():
        # The previous model has left its memory by now.
        gc.collect()
        empty_cache()
        # Nothing that goes wrong here may lose the scores, which took hours.
        try:
            if has_heads_off(model):
                texts = texts or _read_texts(suite, options, say)
                say(f"analysis of {label}: loading {model}")
                found[label] = analyse(*load_moh(model, dtype, device), texts)
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exception(error)  # it may be a bug
            found[label] = {"error": str(error) if isinstance(error, UserError) else one_line(error)}
            say(f"analysis of {label} failed: {found[label]['error']}")
    return found


def _read_texts(suite: Suite, options: EvaluationConfig, say: Callable[[str], None]) -> dict[str, list[str]]:
    say("analysis: reading the benchmarks' text (--no-analysis leaves all of it out)")
    with tempfile.TemporaryDirectory(prefix="moh-eval-") as folder:
        items = min(ANALYSED_ITEMS, options.limit or ANALYSED_ITEMS)
        loaded = load_tasks(suite, Path(folder), options.data_dir, items)
        texts = prompts(loaded, items, lambda line: say(f"analysis: {line}"))
    if not texts:
        raise UserError("no benchmark's text can be built; the lines above say why")
    return texts


def prompts(loaded: list[Loaded], items: int, say: Callable[[str], None] = lambda line: None) -> dict[str, list[str]]:
    """The first items of each benchmark as they are scored: examples, question and right answer in one string.

    Answers that a model writes itself are left out. The items of a benchmark of several tasks are spread over them and
    taken in turn. The tasks are left with the requests of these items. A benchmark whose text cannot be built is left
    out, with a line.
    """
    texts = {}
    for one in loaded:
        counts = [0] * len(one.tasks)
        for item in range(items):
            counts[item * len(one.tasks) // items] += 1
        try:
            by_task = [_of_task(task, count) for task, count in zip(one.tasks, counts, strict=True) if count]
        except Exception as error:  # functions and templates of tasks may raise anything
            say(f"the text of {one.benchmark.name} is left out: {one_line(error)}")
            continue
        texts[one.benchmark.name] = [text for turn in zip_longest(*by_task) for text in turn if text is not None]
    return texts


def _of_task(task: "ConfigurableTask", items: int) -> list[str]:
    """Texts of a task's first items, whose examples are the ones that are scored, as they are drawn item by item."""
    task.set_fewshot_seed(SEEDS["fewshot"])
    task.build_all_requests(limit=items, rank=0, world_size=1)
    requests: dict[int, list[Instance]] = {}
    for request in task.instances:
        requests.setdefault(request.doc_id, []).append(request)
    return [_text(task, choices) for choices in requests.values()]


def _text(task: "ConfigurableTask", requests: "list[Instance]") -> str:
    """One item's request: of several choices the right one, or the first if its number is not known."""
    number = 0
    if len(requests) > 1:
        doc = requests[0].doc
        # Tasks whose choices are in the question have their label there, too.
        label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        number = label if isinstance(label, int) else 0
    # Context and continuation, or context and settings for writing one, or all in one.
    return "".join(part for part in requests[number].args if isinstance(part, str))
