"""Records that model cards are made of, and what every card must keep."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from moh_llm.recipe import keyword_options
from moh_llm.records.conversion import CONVERSION, LINEAGE
from moh_llm.records.evaluation import EvaluationRecord
from moh_llm.records.identity import hash_plan
from moh_llm.records.seal import SEAL
from moh_llm.training.config import TrainConfig

Record = dict[str, Any]
LLAMA_3 = "META LLAMA 3 COMMUNITY LICENSE AGREEMENT\n\nMeta Llama 3 Version Release Date: April 18, 2024\n"


def recipe_of(**given: Any) -> Record:
    """The whole recipe of a run, as its record has it."""
    return json.loads(json.dumps(asdict(keyword_options(TrainConfig, "recipe", **given))))


def write_run(
    folder: Path, model: str, scores: int = 3, record: Record | None = None, steps: int = 6, **recipe: Any
) -> Path:
    """A run of 6 steps of 32 tokens that began with `model`, and made `steps`; its saved model is left to the test."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe.setdefault("data", {"mixture": "/srv/secret/mixes/tiny.yaml", "sequence_length": 16, "batch_size": 2})
    config = recipe_of(model=model, output_dir=str(folder), max_steps=6, **recipe)
    saved = {"tokens": 500, "perplexity": 22.0, "reference_perplexity": 20.0, "kl": 0.05, "top1_agreement": 0.9}
    saved |= {"documents": 40, "ratio_interval": [1.0812, 1.1234], "kl_interval": [0.041, 0.062]}
    read = {"weight": 1.0, "tokens": 192, "share": 1.0, "epochs": 0.5, "repeated_tokens": 0}
    facts = {"status": "finished", "config": config, "model": {"sha256": "ab"}, "device": "cpu", "evaluation": saved}
    facts["reference"] = "base"
    facts |= {"data_read": {"books": read}, "versions": {"moh_llm": "0.1.0", "torch": "2.13.0"}} | (record or {})
    lines = []
    for step in range(1 + steps):
        line: Record = {"step": step}
        if step:
            line |= {"tokens": step * 32, "loss": 0.3 / step, "kl": 0.2 / step, "heads_read": 2.5}
            line["timing"] = {"seconds": 0.25 * step, "tokens_per_second": 100.0 + step}
        if step % 3 == 0 and step < 3 * scores:
            line["validation"] = saved | {"perplexity": 30.0 - step, "kl": 0.5 / (step + 1)}
        lines.append(line)
    (folder / "run.json").write_text(json.dumps(facts))
    write_log(folder, lines)
    return folder


def write_log(folder: Path, lines: list[Record], tail: str = "") -> None:
    """The log of a run; `tail` follows its last line."""
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def read_log(folder: Path) -> list[Record]:
    """The lines of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def write_evaluation(folder: Path, record: Record) -> Path:
    """What `moh-llm evaluate` leaves, as far as cards read it."""
    folder.mkdir(parents=True, exist_ok=True)
    EvaluationRecord.parse(record, "record").write(folder / "report.json")
    return folder


def change(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file of a model's folder, as if it had been made so; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    (path.parent / SEAL).unlink(missing_ok=True)
    if path.name == "config.json" and (path.parent / LINEAGE).is_file():
        plan = hash_plan(path.parent)
        for place in (path.parent / LINEAGE, path.parent / CONVERSION):
            if place.is_file():
                place.write_text(re.sub(r'"plan": "\w+"', f'"plan": "{plan}"', place.read_text()))


def headings(card: str) -> dict[str, str]:
    """Heading -> what stands below it, down to the next one of the same or a higher level; code is no heading."""
    lines, code = ModelCard(card).text.split("\n"), False
    found: list[tuple[int, str, int]] = []
    for number, line in enumerate(lines):
        code ^= line.startswith("```")
        if not code and (match := re.match(r"(#+) (.*)", line)):
            found.append((len(match[1]), match[2], number))
    sections = {}
    for index, (level, title, number) in enumerate(found):
        end = next((other[2] for other in found[index + 1 :] if other[0] <= level), len(lines))
        sections[title] = "\n".join(lines[number + 1 : end])
    assert len(sections) == len(found), "a heading occurs twice"
    return sections


def check_card(card: str) -> dict[str, str]:
    """What holds for every card; returns its sections."""
    sections = headings(card)
    for title, body in sections.items():
        assert [line for line in body.split("\n") if line.strip() and not line.startswith("#")], f"{title} is empty"
    # The library reads the card and writes the same one.
    assert str(ModelCard(card)) == card
    assert not re.search(r"(?<![\w:/.<])/\w+/|[A-Z]:\\|file:", card), "an absolute path"
    body = ModelCard(card).text
    assert "None" not in body and "built-in method" not in body
    assert not re.search(r"[^\n]\n#+ |\n\n\n", body), "a heading without a blank line before, or two blank lines"
    for table in re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().split("\n")}
        assert len(columns) == 1, f"a table's rows differ: {table}"
    return sections
