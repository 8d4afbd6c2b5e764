"""What lm-eval shows a model, as plain text: a few items of each benchmark, for the analysis of heads."""

from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING

from moh_llm.evaluation.scoring import SEEDS
from moh_llm.evaluation.tasks import Loaded

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import ConfigurableTask

ITEMS = 32


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
        try:
            texts[one.benchmark.name] = _prompts(one.tasks, items)
        except Exception as error:  # functions and templates of tasks may raise anything
            reason = " ".join(str(error).split())[:300]
            say(f"the text of {one.benchmark.name} is left out: {type(error).__name__}: {reason}")
    return texts


def _prompts(tasks: "list[ConfigurableTask]", items: int) -> list[str]:
    counts = [0] * len(tasks)
    for item in range(items):
        counts[item * len(tasks) // items] += 1
    texts = [_of_task(task, count) for task, count in zip(tasks, counts, strict=True) if count]
    return [text for turn in zip_longest(*texts) for text in turn if text is not None]


def _of_task(task: "ConfigurableTask", items: int) -> list[str]:
    """Texts of a task's first items. Examples are drawn item by item, so that these are the ones that are scored."""
    task.set_fewshot_seed(SEEDS["fewshot"])
    task.build_all_requests(limit=items, rank=0, world_size=1)
    requests: dict[int, list[Instance]] = {}
    for request in task.instances:
        requests.setdefault(request.doc_id, []).append(request)
    return [_text(task, choices) for choices in requests.values()]


def _text(task: "ConfigurableTask", requests: "list[Instance]") -> str:
    """One item's request, of several choices the right one, or the first where that is not told by a number."""
    number = 0
    if len(requests) > 1:
        doc = requests[0].doc
        # Tasks whose choices are in the question have their label there, too.
        label = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        number = label if isinstance(label, int) else 0
    # Context and continuation, or context and settings for writing one, or all in one.
    return "".join(part for part in requests[number].args if isinstance(part, str))
