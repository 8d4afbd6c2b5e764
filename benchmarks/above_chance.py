"""What models keep of their base's margin over chance, and of the likelihood that it gives the right answers.

    python benchmarks/above_chance.py BASE --models converted=out/moh tuned=out/recovery/model paper=out/paper \\
        --data-dir out/benchmarks --output-dir out/above_chance

scores LAMBADA, SciQ, PIQA, HellaSwag, ARC-Easy, WinoGrande, BoolQ and OpenBookQA (`above_chance.yaml`) without
examples, by lm-eval. Figures: accuracy in percent; margin, accuracy less what guessing gives; kept, the margin's share
of the base's, none where the base's interval reaches chance; nats, by how much the log-likelihood of the right answer
is above the base's. The last row is the mean over benchmarks, of the margins over those
that the base is above chance on. Intervals are 95 %, by bootstrap over items, which all models share. Below the table:
what share of the base's keys each converted model reads in the first prompts of each benchmark, a mean over benchmarks
and in each. --output-dir holds the finished benchmarks of each model, so that the same command goes on where it stopped
and takes more models, and `above_chance.json`. The same of prompts of 2,000 to 4,000 tokens:

    python benchmarks/above_chance.py BASE --suite benchmarks/long_prompts.yaml --models ...
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from command import RESAMPLES, add_compute_dtype, status_of
from long_context import hidden_and_gates, keys_read
from transformers import AutoConfig, AutoTokenizer

from moh_llm.devices import choose_device
from moh_llm.errors import UserError
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.evaluate import prompts
from moh_llm.evaluation.processes import Finished
from moh_llm.evaluation.runner import ModelScores, installed_versions, score
from moh_llm.evaluation.suite import Benchmark, load_suite
from moh_llm.evaluation.tasks import Loaded, load_tasks
from moh_llm.files import write_json
from moh_llm.intervals import show_figure
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

SUITE = Path(__file__).with_suffix(".yaml")
BATCH = 8
PROMPTS = 4  # of each benchmark, in which the keys that are read are counted


class Items(NamedTuple):
    """What one model does on the items of a benchmark: each `[N]`."""

    right: np.ndarray  # scores from 0 to 1
    chance: np.ndarray
    gold: np.ndarray  # log-likelihood of the right answer, nats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or Hub id of the dense model")
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME=MODEL", help="models to compare with it")
    parser.add_argument("--suite", default=str(SUITE), help="YAML file of benchmarks (default: above_chance.yaml here)")
    parser.add_argument("--data-dir", type=Path, help="local data, as for moh-llm evaluate (default: the Hub)")
    parser.add_argument("--items", type=int, default=1000, help="at most so many of each benchmark (default: 1000)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="benchmarks (default: all)")
    add_compute_dtype(parser)
    parser.add_argument("--output-dir", type=Path, required=True)
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    models = {"base": args.base}
    for given in args.models:
        name, _, model = given.partition("=")
        if not model or name in models:
            raise UserError(f"--models {given}: give NAME=MODEL, each with a name of its own that is not base")
        models[name] = model
    suite = load_suite(args.suite)
    known = [benchmark.name for benchmark in suite.benchmarks]
    if unknown := [name for name in args.only or () if name not in known]:
        raise UserError(f"--only {unknown[0]}: must be of {', '.join(known)}")
    suite = dataclasses.replace(suite, benchmarks=[b for b in suite.benchmarks if b.name in (args.only or known)])
    finished = Finished(args.output_dir)
    how = {"limit": args.items, "batch_size": BATCH, "compute_dtype": args.compute_dtype, "log_samples": True}
    options = EvaluationConfig([*models.values()], data_dir=args.data_dir, **how)
    scores = score(models, suite, options, finished=finished)
    for name, result in scores.items():
        if result.errors:
            raise UserError(f"{name}: {next(iter(result.errors.items()))}; the same command goes on")
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_tasks(suite, Path(folder), args.data_dir, args.items)
        found = {
            label: {one.benchmark.name: items_of(scores[label], one, finished, label, args.items) for one in loaded}
            for label in models
        }
        keys = keys_of(models, prompts(loaded, PROMPTS, say=print), args.base, scores["base"].dtype)
    rows = table(found, suite.benchmarks)
    print_rows(rows)
    for label, read in keys.items():
        by_name = ", ".join(f"{name} {share:.3f}" for name, share in read.items())
        print(f"{label} reads {np.mean([*read.values()]):.3f} of the base's keys: {by_name}")
    versions = installed_versions()
    print(f"{scores['base'].dtype}, {', '.join(f'{name} {version}' for name, version in versions.items())}")
    record = {"models": models, "suite": suite.name, "items": args.items, "keys": keys}
    record |= {"versions": versions, "rows": rows}
    write_json(args.output_dir / "above_chance.json", record)


@torch.no_grad()
def keys_of(models: dict[str, str], texts: dict[str, list[str]], base: str, dtype: str) -> dict[str, dict[str, float]]:
    """The share of the base's keys that each converted model reads in each benchmark's texts, in that dtype."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    found = {}
    for label, name in models.items():
        if not isinstance(AutoConfig.from_pretrained(name), MoHLlamaConfig):
            continue
        model = MoHLlamaForCausalLM.from_pretrained(name, dtype=dtype).to(choose_device(None)).eval()
        found[label] = {
            benchmark: float(np.mean([share_read(model, tokenizer(text)["input_ids"]) for text in own]))
            for benchmark, own in texts.items()
        }
    return found


def share_read(model: MoHLlamaForCausalLM, tokens: list[int]) -> float:
    """The share of the base's keys that the model reads in one text."""
    _, on = hidden_and_gates(model, torch.tensor([tokens], device=model.device))
    return keys_read(on.mean(0), model.config)


def items_of(result: ModelScores, loaded: Loaded, finished: Finished, label: str, limit: int) -> Items:
    """The items of one model on one benchmark, which is one task."""
    name, (task,) = loaded.benchmark.name, loaded.tasks
    gold = []
    with finished.file(label, name).open(encoding="utf-8") as lines:
        next(lines)  # the scores
        for line, row in zip(lines, task.task_docs.select(range(min(limit, len(task.task_docs)))), strict=True):
            item, answer = json.loads(line), 0
            if task.OUTPUT_TYPE == "multiple_choice":
                given = task.doc_to_text(row) if task.multiple_input else task.doc_to_target(row)
                answer = given if isinstance(given, int) else task.doc_to_choice(row).index(given)
            gold.append(float(item["resps"][answer][0][0]))
    (right,) = result.scores[name].strata
    chances = result.chances[name]
    assert chances is not None
    return Items(np.array(right), np.array(chances[0]), np.array(gold))


def table(found: dict[str, dict[str, Items]], benchmarks: Sequence[Benchmark]) -> list[dict[str, Any]]:
    """A row for each benchmark and model, and for the means over benchmarks of each model."""
    everything = [benchmark.name for benchmark in benchmarks]
    draws = {name: draw(len(found["base"][name].right), seed) for seed, name in enumerate(everything)}
    above = [name for name in everything if ends(margin(found["base"][name], draws[name]))[0] > 0]

    def row(name: str, label: str, names: Sequence[str], ranked: Sequence[str], has_share: bool) -> dict[str, Any]:
        """Figures with their intervals, shares and accuracies in percent: means over `names`, margins over `ranked`."""
        base, own = found["base"], found[label]
        margins, of_base = (np.mean([margin(of[n], draws[n]) for n in ranked], axis=0) for of in (own, base))
        values = {"accuracy": 100 * np.mean([draws[n] @ own[n].right for n in names], axis=0), "margin": 100 * margins}
        values["nats"] = np.mean([draws[n] @ (own[n].gold - base[n].gold) for n in names], axis=0)
        if has_share:
            values["kept"] = 100 * margins / of_base
        shown = {key: {"value": float(each[0]), "interval": ends(each)} for key, each in values.items()}
        return {"benchmark": name, "model": label, "items": sum(len(own[n].right) for n in names)} | shown

    rows = [row(name, label, [name], [name], name in above) for name in everything for label in found]
    mean_of = f"mean of {len(everything)}, {len(above)} above chance"
    return rows + [row(mean_of, label, everything, above or everything, bool(above)) for label in found]


def draw(count: int, seed: int) -> np.ndarray:
    """How often each of `count` items is in each resample, `[1 + R, count]`; the first row is the items themselves."""
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return np.concatenate([np.ones((1, count)), drawn]) / count


def margin(items: Items, weights: np.ndarray) -> np.ndarray:
    """Mean margin over chance of the items and of each resample, `[1 + R]`."""
    return weights @ (items.right - items.chance)


def ends(values: np.ndarray) -> list[float]:
    """95 % interval of a figure `[1 + R]`."""
    return np.percentile(values[1:], (2.5, 97.5)).tolist()


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The table in Markdown."""
    columns = {"accuracy": ".1f", "margin": ".1f", "kept": ".1f", "nats": ".4f"}
    print("| benchmark | items | model | accuracy | margin | kept, % | nats |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            show_figure(row[key]["value"], row[key]["interval"], form) if key in row else "-"
            for key, form in columns.items()
        ]
        print(f"| {row['benchmark']} | {row['items']} | {row['model']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
