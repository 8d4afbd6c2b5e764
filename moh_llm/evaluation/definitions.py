"""Definitions of tasks: which files they are made of, and whether a suite asks for what they have."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from moh_llm.evaluation.chance import lacks_choices
from moh_llm.evaluation.suite import Benchmark
from moh_llm.files import sha256
from moh_llm.reading import YAML_BYTES, parse_yaml, read_text

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

# What lm-eval computes for each item, by kind of task; its other metrics have a number for all items together only.
_ITEM_METRICS = {
    "multiple_choice": {"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"},
    "loglikelihood": {"acc", "perplexity"},
    "loglikelihood_rolling": set(),
}


def unknown_names(benchmark: Benchmark, tasks: "list[ConfigurableTask]") -> list[str]:
    """What a benchmark asks of its tasks that they cannot give, task by task: metric, filter or chance level."""
    unknown = []
    for task in tasks:
        metrics, filters = _metrics(task), [steps.name for steps in task._filters]
        for key, asked, known in (("metric", benchmark.metric, metrics), ("filter", benchmark.filter, filters)):
            if known is not None and asked not in known:
                unknown.append(f"{key} {asked!r}: {task.config.task} has {', '.join(known) or 'none for each item'}")
        if lacks_choices(benchmark, task):
            unknown.append(f"chance 'choices': {task.config.task} gives {benchmark.metric} without a choice")
    return unknown


def _metrics(task: "ConfigurableTask") -> list[str] | None:
    """The metrics with a number for each item; None where functions name them only when they are called."""
    if any(callable(metric["metric"]) or metric.get("hf_evaluate") for metric in task.config.metric_list or ()):
        return None
    names = list(task.aggregation())
    if callable(task.config.process_results) or task.OUTPUT_TYPE not in _ITEM_METRICS:
        return names
    return [name for name in names if name in _ITEM_METRICS[task.OUTPUT_TYPE]]


def hash_definitions(definitions: Iterable[Path]) -> str:
    """SHA-256 of the contents of all that tasks are made of: YAML files, what they include, Python files beside them.

    Of a function that lies in an installed package the name counts, not the code.
    """
    files = {file for definition in definitions for file in _files(definition)}
    return hashlib.sha256("".join(sorted(sha256(file) for file in files)).encode()).hexdigest()


def _files(definition: Path) -> set[Path]:
    class Loader(yaml.SafeLoader):
        """Reads functions as their names."""

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    found: set[Path] = set()
    waiting = [definition]
    while waiting:
        file = waiting.pop().resolve()
        if file in found:
            continue
        text = read_text(file, YAML_BYTES)
        included = parse_yaml(text, str(file), Loader).get("include", [])
        waiting += [file.parent / name for name in ([included] if isinstance(included, str) else included)]
        modules = [file.parent / f"{name.replace('.', '/')}.py" for name in re.findall(r"!function\s+([\w.]+)\.", text)]
        folders = {file.parent, *(module.resolve().parent for module in modules)}
        found |= {file, *(module for folder in folders for module in folder.glob("*.py"))}
    return found
