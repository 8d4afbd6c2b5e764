"""Models with value and local fallbacks, converted from one base, tuned, evaluated and described by their cards."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tiny import save_model

from recount.prompts import right_answers

WORDS = ["the", "river", "was", "high", "that", "spring", "and", "boats", "lay", "tied", "to", "poplars", "below"]
CONTEXT = 768  # tokens of calibration and verification
CALIBRATION_TOKENS, HELDOUT_TOKENS = 3840, 4608
SEQUENCE, STEPS = 256, 6  # of the training run
KINDS = ("value", "local")


@dataclass(frozen=True)
class Kind:
    """How one of the models is made: options of its conversion, and what its recipe has of its own."""

    options: dict[str, Any]
    recipe: dict[str, Any]


MADE = {
    "value": Kind({"num_active_heads": 5, "fallback": "value"}, {}),
    "local": Kind({"num_active_heads": 4, "budgets": "even", "fallback": "local"}, {"freeze_base": True}),
}


@dataclass(frozen=True)
class Model:
    """The folders of one model. Below `root`: `moh` is converted, `run` the run from it, `report` an evaluation of
    the tuned model beside its base."""

    kind: str
    root: Path

    @property
    def base(self) -> Path:
        return self.root.parent / "base"

    @property
    def mixture(self) -> Path:
        return self.root.parent / "mixture.yaml"

    @property
    def converted(self) -> Path:
        return self.root / "moh"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def tuned(self) -> Path:
        return self.run / "model"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def recipe(self) -> dict[str, Any]:
        return yaml.safe_load((self.root / "recipe.yaml").read_text())

    def read(self, *path: str) -> Any:
        """A JSON file below `root`."""
        return json.loads(self.root.joinpath(*path).read_text())


def make_base(folder: Path) -> None:
    """Write the base, and a mixture of two sources whose files have one name: many short documents and fewer long."""
    from transformers import LlamaConfig

    fields = {"num_attention_heads": 8, "hidden_size": 64, "max_position_embeddings": 1024, "initializer_range": 0.1}
    (folder / "base").mkdir()
    save_model(folder / "base", LlamaConfig, vectors=False, **fields)
    _teach(folder / "base")
    (folder / "base" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n\nA random model.\n")
    draw, sources = random.Random(0), {}
    for name, weight, count, words in (("short", 0.97, 700, (8, 60)), ("long", 0.03, 80, (120, 260))):
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(*words))) for _ in range(count)]
        (folder / name).mkdir()
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / name / "text.jsonl").write_text(lines)
        sources[name] = {"weight": weight, "files": f"{name}/text.jsonl"}
    mixture = {"name": "recounted", "validation_share": 0.2, "sources": sources}
    (folder / "mixture.yaml").write_text(yaml.safe_dump(mixture, sort_keys=False))


def _teach(folder: Path) -> None:
    """Train the base on the smoke suite's right answers, so that its scores are above chance."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [text for found in right_answers().values() for text in found]
    rows = [torch.tensor(tokenizer(text)["input_ids"][-64:]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def make_model(model: Model) -> None:
    """Convert the base, and train the model."""
    import moh_llm

    model.root.mkdir()
    moh_llm.convert(
        model.base,
        output_dir=model.converted,
        calibration=[str(model.mixture)],
        context=CONTEXT,
        calibration_tokens=CALIBRATION_TOKENS,
        heldout_tokens=HELDOUT_TOKENS,
        **MADE[model.kind].options,
    )
    (model.root / "recipe.yaml").write_text(yaml.safe_dump(_recipe(model)))
    moh_llm.train(model.root / "recipe.yaml")


def make_report(model: Model) -> None:
    """Evaluate the tuned model beside its base."""
    from moh_llm.cli import main

    words = ["evaluate", model.tuned, "--base", model.base, "--suite", "smoke", "--device", "cpu"]
    assert main([str(word) for word in [*words, "--output-dir", model.report]]) == 0


def _recipe(model: Model) -> dict[str, Any]:
    recipe = {
        "model": str(model.converted),
        "output_dir": str(model.run),
        "max_steps": STEPS,
        "mixed_precision": "no",
        "report_to": [],
        "data": {"mixture": str(model.mixture), "sequence_length": SEQUENCE, "batch_size": 4, "micro_batch_size": 2},
        "optimizer": {"learning_rate": 1e-3, "router_learning_rate": 1e-2},
        "schedule": {"warmup_steps": 2, "final_learning_rate": 1e-4},
        "evaluation": {"eval_steps": 3, "max_tokens": 2048},
        "checkpoint": {"save_steps": 1, "save_total_limit": STEPS},  # all, so that each step can be made again
    }
    for name, value in MADE[model.kind].recipe.items():
        recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
    return recipe
