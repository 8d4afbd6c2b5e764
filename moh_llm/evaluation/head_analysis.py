"""Analysis of the scored models' heads on the text of the suite's benchmarks."""

import gc
import tempfile
import traceback
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.devices import empty_cache
from moh_llm.errors import UserError
from moh_llm.evaluation.models import register_moh
from moh_llm.evaluation.scoring import SEEDS
from moh_llm.evaluation.suite import Suite
from moh_llm.evaluation.tasks import Loaded, load_tasks, one_line

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

Record = dict[str, Any]
ITEMS = 32


def analyse_models(
    models: dict[str, str],
    suite: Suite,
    data_dir: Path | None,
    device: str,
    dtype: str,
    say: Callable[[str], None],
    limit: int | None = None,
) -> dict[str, Record]:
    """Analyse each of ``models`` (label to path or Hub id) that has heads off, one in memory at a time.

    Args:
        models: dense models and those with every head on are left out.
        suite: the benchmarks whose text is read.
        data_dir: as `runner.score` takes it.
        device: the torch device; this process works alone.
        dtype: name of the torch dtype.
        say: receives a line for each stage.
        limit: items of each benchmark, where fewer than `ITEMS` are scored.

    Returns:
        By label, the record of `moh_llm.analysis.record.analyse`; or ``{"error": ...}``, in one line, for
        a model whose analysis failed.
    """
    found: dict[str, Record] = {}
    texts: dict[str, list[str]] = {}
    for label, model in models.items():
        # The previous model has left its memory by now.
        gc.collect()
        empty_cache()
        # Nothing that goes wrong here may lose the scores, which took hours.
        try:
            if _chooses(model):
                texts = texts or _read_texts(suite, data_dir, say, limit)
                found[label] = _analyse(label, model, texts, device, dtype, say)
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exception(error)  # it may be a bug
            found[label] = {"error": str(error) if isinstance(error, UserError) else one_line(error)}
            say(f"analysis of {label} failed: {found[label]['error']}")
    return found


def prompts(
    loaded: list[Loaded], items: int = ITEMS, say: Callable[[str], None] = lambda line: None
) -> dict[str, list[str]]:
    """The first items of each benchmark, one string an item: examples, question and right answer, as they are scored.

    An answer that the model has to write itself is left out. Where a benchmark is made of several
    tasks, the items are spread over them and taken in turn; of more tasks than items some are left out.

    Args:
        loaded: the benchmarks. Their tasks are left with the requests of these items.
        items: how many of each benchmark; fewer where a task has fewer.
        say: receives a line for each benchmark that is left out because its text cannot be built.
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
    """Texts of a task's first items. Examples are drawn item by item, so that these are the ones that are scored."""
    task.set_fewshot_seed(SEEDS["fewshot"])
    task.build_all_requests(limit=items, rank=0, world_size=1)
    requests: dict[int, list[Instance]] = {}
    for request in task.instances:
        requests.setdefault(request.doc_id, []).append(request)
    return [_text(task, choices) for choices in requests.values()]


def _text(task: "ConfigurableTask", requests: "list[Instance]") -> str:
    """One item's request, of several choices the right one, or the first where its number is not known."""
    number = 0
    if len(requests) > 1:
        doc = requests[0].doc
        # Tasks whose choices are in the question have their label there, too.
        label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        number = label if isinstance(label, int) else 0
    # Context and continuation, or context and settings for writing one, or all in one.
    return "".join(part for part in requests[number].args if isinstance(part, str))


def _chooses(model: str) -> bool:
    """Whether some head of a model is off."""
    from transformers import AutoConfig

    from moh_llm.modeling import MoHLlamaConfig

    register_moh()
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return isinstance(config, MoHLlamaConfig) and min(config.active_heads_per_layer) < config.num_attention_heads


def _read_texts(
    suite: Suite, data_dir: Path | None, say: Callable[[str], None], limit: int | None
) -> dict[str, list[str]]:
    say("analysis: reading the benchmarks' text (--no-analysis leaves all of it out)")
    with tempfile.TemporaryDirectory(prefix="moh-eval-") as folder:
        items = min(ITEMS, limit or ITEMS)
        loaded = load_tasks(suite, Path(folder), data_dir, items)
        texts = prompts(loaded, items, lambda line: say(f"analysis: {line}"))
    if not texts:
        raise UserError("no benchmark's text can be built; the lines above say why")
    return texts


def _analyse(
    label: str, model: str, texts: dict[str, list[str]], device: str, dtype: str, say: Callable[[str], None]
) -> Record:
    from transformers import AutoTokenizer

    from moh_llm.analysis.record import analyse
    from moh_llm.modeling import MoHLlamaForCausalLM

    say(f"analysis of {label}: loading {model}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        loading = {"dtype": dtype, "use_safetensors": True, "return_dict": True}
        network = MoHLlamaForCausalLM.from_pretrained(model, **loading).to(device)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{model} cannot be loaded: {one_line(error)}") from error
    return analyse(network, tokenizer, texts)
