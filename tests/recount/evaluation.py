"""What the `report.json` of an evaluation should hold: scores by plain likelihoods and greedy decoding."""

import math
import re
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recount import analysis, hashes, intervals, network
from recount.leaves import PLACE, TIME, Exempt
from recount.prompts import Item, items
from recount.training import Run

ABOUT = {  # of a benchmark: shots, metric, splits, rule of chance, chance of an item, lm-eval's task
    "Facts": (0, "acc", None, "choices", 0.25, "moh_smoke_facts"),
    "Stories": (2, "acc", "train", "choices", 0.5, "moh_smoke_stories"),
    "Answers": (3, "exact_match (first_word)", "train", 0.0, 0.0, "moh_smoke_answers"),
}
LABELS = ("base", "model")


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

    @cached_property
    def rows(self) -> dict[str, dict[str, Any]]:
        """By benchmark, the figures of both models."""
        return {name: _figures(name, self.scores[name]) for name in ABOUT}


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
    chance, task = ABOUT[name][4:]
    found: dict[str, Any] = {}
    for label, own in scores.items():
        figures = value(own, 0, 1) | {
            "items": len(own),
            "truncated": False,
            "tasks": {task: {"value": 100 * float(own.mean()), "items": len(own)}},
            "margin": value(own - chance, -chance, 1 - chance),
        }
        if label != "base":
            delta, margin = value(own - scores["base"], -1, 1), value(scores["base"] - chance, -chance, 1 - chance)
            figures |= {"delta": delta, "at_chance": margin["interval"][0] <= 0}
            figures |= {"recovery": intervals.kept(figures, value(scores["base"], 0, 1), delta)}
            if not figures["at_chance"]:
                figures["margin_kept"] = intervals.kept(figures["margin"], margin, delta)
        found[label] = figures
    return found


def expected_report(evaluation: Evaluation) -> dict[str, Any]:
    """The whole of `report.json`."""
    return {
        "version": PLACE,
        "suite": {"name": "smoke", "title": Exempt("a title"), "columns": []},
        "models": {"base": _base(evaluation), "model": _model(evaluation)},
        "benchmarks": [_row(evaluation, name) for name in ABOUT],
        "average": _average(evaluation),
        "errors": [],
        "limit": None,
        "partial_data": [],
        "data": "the suite's own",
        "dtype": "float32",
        "batch_size": 8,
        "processes": 1,
        "seeds": Exempt("settings"),
        "versions": PLACE,
        "command": Exempt("the command line"),
        "created": PLACE,
        "analysis": {"model": analysis.expected(evaluation.tokenizer, evaluation.tuned)},
    }


def _base(evaluation: Evaluation) -> dict[str, Any]:
    folder = evaluation.base
    return {
        "model": str(folder),
        "model_type": "llama",
        "plan_sha256": None,
        "records": [],
        "weights_sha256": hashes.weights_sha256(folder),
        "compared": False,
        "attention_backend": None,
        **_how_it_ran(evaluation),
    }


def _model(evaluation: Evaluation) -> dict[str, Any]:
    folder, config = evaluation.tuned, evaluation.config
    names = ("num_attention_heads", "num_shared_heads", "num_active_heads", "shared_heads", "router_type")
    names += ("router_score", "routing_granularity", "head_fallback")
    records = [folder / "conversion.json", folder / "lineage.json", folder.parent / "run.json"]
    return {
        "model": str(folder),
        "model_type": "moh_llama",
        "plan_sha256": hashes.plan_sha256(folder),
        "heads": {name: config[name] for name in names},
        "records": [str(path) for path in records],
        "weights_sha256": hashes.weights_sha256(folder),
        "compared": True,
        "attention_backend": PLACE,
        **_how_it_ran(evaluation),
    }


def _how_it_ran(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "revision": None,
        "dtype": "float32",
        "device": "cpu",
        "hardware": PLACE,
        "context": 1024,
        "seconds": TIME,
        "items": sum(len(found) for found in items().values()),
        "other_base": None,
    }


def _row(evaluation: Evaluation, name: str) -> dict[str, Any]:
    shots, metric, fewshot, rule, chance, _ = ABOUT[name]
    return {
        "name": name,
        "shots": shots,
        "metric": metric,
        "dataset": "moh-llm/smoke",
        "dataset_config": name.lower(),
        "revision": None,
        "data_sha256": Exempt("a hash of the data's files"),
        "eval_split": "test",
        "fewshot_split": fewshot,
        "items_in_full": len(items()[name]),
        "chance_rule": rule,
        "chance": 100 * chance,
        "note": "",
        "published": {},
        "scores": evaluation.rows[name],
    }


def _average(evaluation: Evaluation) -> dict[str, Any]:
    rows = list(evaluation.rows.values())
    figures = {label: _mean([row[label] for row in rows]) for label in LABELS}
    delta = _mean([row["model"]["delta"] for row in rows])
    recovery = intervals.kept(figures["model"], figures["base"], delta)
    figures["model"] |= {"delta": delta, "recovery": recovery, "margin_kept": _margin_kept(evaluation)}
    return {"over": len(ABOUT), "total": len(ABOUT), "published": {}, "scores": figures}


def _mean(values: list[dict[str, Any]]) -> dict[str, Any]:
    means = [one["value"] for one in values]
    error = math.sqrt(sum(one["stderr"] ** 2 for one in values)) / len(values)
    interval = intervals.of_mean(means, [one["interval"] for one in values])
    return {"value": sum(means) / len(means), "stderr": error, "interval": interval}


def _margin_kept(evaluation: Evaluation) -> dict[str, Any]:
    above = [name for name, row in evaluation.rows.items() if not row["model"]["at_chance"]]
    left_out = {"at_chance": [name for name in ABOUT if name not in above], "unknown": []}
    if not above:
        return {"share": None, "model": None, "base": None, "over": 0, "total": len(ABOUT), **left_out}
    rows = [evaluation.rows[name] for name in above]
    margins = {label: _mean([row[label]["margin"] for row in rows]) for label in LABELS}
    kept = intervals.kept(margins["model"], margins["base"], _mean([row["model"]["delta"] for row in rows]))
    means = {label: margins[label]["value"] for label in LABELS}
    return {**kept, **means, "over": len(above), "total": len(ABOUT), **left_out}
