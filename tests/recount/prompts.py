"""The prompts of the smoke suite, from its items and by its task files, written anew."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moh_llm

DATA = Path(moh_llm.__file__).parent / "evaluation" / "suites" / "smoke" / "moh-llm__smoke"


@dataclass(frozen=True)
class Item:
    """An item: what the model reads, the continuations that it chooses among, and which of them is right.

    Without `choices` it writes its answer, which should begin with the word `answer`.
    """

    prompt: str
    choices: list[str]
    right: int
    answer: str = ""

    @property
    def text(self) -> str:
        """The prompt with the right choice."""
        return self.prompt + (self.choices[self.right] if self.choices else "")


def _read(name: str, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name / f"{split}.jsonl").read_text().splitlines()]


def items() -> dict[str, list[Item]]:
    """The items of each benchmark."""
    facts = [
        Item(row["sentence"], [f" {choice}" for choice in row["choices"]], row["answer"])
        for row in _read("facts", "test")
    ]
    told = "".join(
        f"Story: {row['story']}\nEnding: {row['endings'][row['answer']]}\n\n" for row in _read("stories", "train")
    )
    stories = [
        Item(f"{told}Story: {row['story']}\nEnding:", [f" {ending}" for ending in row["endings"]], row["answer"])
        for row in _read("stories", "test")
    ]
    asked = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n" for row in _read("answers", "train"))
    answers = [
        Item(f"{asked}Question: {row['question']}\nAnswer:", [], 0, row["answer"]) for row in _read("answers", "test")
    ]
    return {"Facts": facts, "Stories": stories, "Answers": answers}


def right_answers() -> dict[str, list[str]]:
    """Each benchmark's prompts with the right answers, also of those that the model writes."""
    return {
        name: [item.text + (f" {item.answer}" if item.answer else "") for item in found]
        for name, found in items().items()
    }
