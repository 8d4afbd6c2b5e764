"""What the `report.json` of an evaluation should hold: scores by plain likelihoods and greedy decoding."""

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moh_llm.records.identity import identify
from recount import intervals, network
from recount.leaves import TIME, Exempt
from recount.prompts import Item, items
from recount.training import Run

# Of a benchmark: shots, chance of an item, lm-eval's task.
ABOUT = {"Facts": (0, 0.25, "moh_smoke_facts"), "Stories": (2, 0.5, "moh_smoke_stories")}
ABOUT["Answers"] = (3, 0.0, "moh_smoke_answers")
LABELS = ("base", "model")
LOOPS = Exempt("tests/analysis and tests/evaluation compare it with loops")


class Evaluation(Run):
    """Scores of each item of the smoke suite, by the base and by the tuned model."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.base)

    @cached_property
    def scores(self) -> dict[str, dict[str, np.ndarray]]:
        """By benchmark and label, the score of each item, 0 or 1."""
        networks = {"base": self.base_network, "model": network.load(self.tuned)}
        return {
            name: {label: score(networks[label], self.tokenizer, found) for label in LABELS}
            for name, found in items().items()
        }


@torch.no_grad()
def score(model: nn.Module, tokenizer: PreTrainedTokenizerBase, found: list[Item]) -> np.ndarray:
    """Of each item 1 where the model's likeliest choice is the right one, or where its answer begins with the word."""
    right = []
    for item in found:
        prompt = tokenizer(item.prompt)["input_ids"]
        if not item.choices:
            written = tokenizer.decode(_write(model, prompt, stop=tokenizer("\n")["input_ids"][0]))
            words = re.findall(r"(\w+)", written)
            right.append(float(bool(words) and words[0].lower() == item.answer.lower()))
            continue
        likelihoods = []
        for choice in item.choices:
            ids = torch.tensor(tokenizer(item.prompt + choice)["input_ids"])
            logs = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
            places = torch.arange(len(prompt), len(ids))
            likelihoods.append(logs[places - 1, ids[places]].sum().item())
        right.append(float(int(np.argmax(likelihoods)) == item.right))
    return np.array(right)


def _write(model: nn.Module, prompt: list[int], stop: int, most: int = 6) -> list[int]:
    """The tokens that a model writes, each the likeliest, up to a line break or the end of the text."""
    ids = list(prompt)
    for _ in range(most):
        token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token in (stop, 0):
            break
        ids.append(token)
    return ids[len(prompt) :]


def value(scores: np.ndarray, low: float, high: float) -> dict[str, Any]:
    """Mean, standard error and interval in percent, of items that lie between two bounds."""
    mean, error = 100 * float(scores.mean()), 100 * float(scores.std(ddof=1)) / math.sqrt(len(scores))
    return {"value": mean, "stderr": error, "interval": [100 * end for end in intervals.of_items(scores, low, high)]}


def _figures(name: str, scores: dict[str, np.ndarray]) -> dict[str, Any]:
    _, chance, task = ABOUT[name]
    found: dict[str, Any] = {}
    for label, own in scores.items():
        found[label] = value(own, 0, 1) | {
            "items": len(own),
            "seconds": TIME,
            "batch_size": 8,
            "tasks": {task: {"value": 100 * float(own.mean()), "items": len(own)}},
            "margin": value(own - chance, -chance, 1 - chance),
        }
    delta = value(scores["model"] - scores["base"], -1, 1)
    found["model"] |= {"delta": delta, "recovery": LOOPS, "margin_kept": LOOPS}
    return found


def expected_report(evaluation: Evaluation) -> dict[str, Any]:
    """The figures of `report.json`."""
    return {
        "models": {"base": _model(evaluation.base), "model": _model(evaluation.tuned)},
        "benchmarks": [
            {
                "shots": ABOUT[name][0],
                "items_in_full": len(found),
                "chance": 100 * ABOUT[name][1],
                "chance_rule": Exempt("the suite's"),
                "scores": _figures(name, evaluation.scores[name]),
            }
            for name, found in items().items()
        ],
        "average": LOOPS,
        "batch_size": 8,
        "processes": 1,
        "version": Exempt("settings"),
        "seeds": Exempt("settings"),
        "analysis": LOOPS,
    }


def _model(folder: Path) -> dict[str, Any]:
    identity = identify(str(folder))
    return {
        "plan_sha256": identity.plan,
        "weights_sha256": identity.weights,
        "heads": Exempt("the config's"),
        "context": 1024,
        "seconds": TIME,
        "items": sum(len(found) for found in items().values()),
    }
