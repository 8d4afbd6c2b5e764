"""The benchmark of margins over chance, on few rows of its datasets' form: figures of plain loops, and going on."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
pytest.importorskip("lm_eval")
import above_chance

from moh_llm.modeling import MoHLlamaForCausalLM

ROWS = 12
WORDS = ["river", "boat", "mill", "poplar", "noon", "bird"]


def rows_of(make: Callable[[int, list[str]], dict]) -> list[dict]:
    return [make(number, WORDS[number % 6 :] + WORDS[: number % 6]) for number in range(ROWS)]


def choices(words: list[str]) -> dict:
    return {"text": words[:4], "label": ["A", "B", "C", "D"]}


DATA = {
    "EleutherAI__lambada_openai/default/test": rows_of(lambda n, w: {"text": f"The {w[0]} is by the {w[1]}"}),
    "allenai__sciq/default/test": rows_of(
        lambda n, w: {
            "question": f"What is {n}?", "support": f" The {w[0]}.", "correct_answer": w[0],
            "distractor1": w[1], "distractor2": w[2], "distractor3": w[3],
        }
    ),
    "baber__piqa/default/validation": rows_of(
        lambda n, w: {"goal": f"Go to {n}.", "sol1": w[0], "sol2": w[1], "label": n % 2}
    ),
    "Rowan__hellaswag/default/validation": rows_of(
        lambda n, w: {
            "ind": n, "activity_label": "Rowing", "ctx_a": f"A {w[0]}.", "ctx_b": "it", "ctx": f"A {w[0]}. it",
            "endings": w[:4], "label": str(n % 4),
        }
    ),
    "allenai__ai2_arc/ARC-Easy/test": rows_of(
        lambda n, w: {"id": str(n), "question": f"Which {n}?", "choices": choices(w), "answerKey": "ABCD"[n % 4]}
    ),
    "allenai__winogrande/winogrande_xl/validation": rows_of(
        lambda n, w: {
            "sentence": f"The {w[2]} saw {n} and the _ was wet.", "option1": w[0], "option2": w[1],
            "answer": str(1 + n % 2),
        }
    ),
    "aps__super_glue/boolq/validation": rows_of(
        lambda n, w: {"question": f"is {n} a {w[0]}", "passage": f"The {w[1]}.", "idx": n, "label": n % 2}
    ),
    "allenai__openbookqa/main/test": rows_of(
        lambda n, w: {"id": str(n), "question_stem": f"The {n} is a", "choices": choices(w), "answerKey": "ABCD"[n % 4]}
    ),
}  # fmt: skip


@pytest.fixture
def command(tiny_llama, tiny_moh, tmp_path, monkeypatch, capsys):
    for place, rows in DATA.items():
        path = tmp_path / "data" / f"{place}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*arguments: str):
        words = ["above_chance.py", str(tiny_llama), "--data-dir", str(tmp_path / "data")]
        words += ["--output-dir", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", [*words, *arguments])
        status, printed = above_chance.main(), capsys.readouterr()
        record = tmp_path / "out" / "above_chance.json"
        return status, printed, json.loads(record.read_text()) if record.exists() else None

    return run


def log_likelihood(folder: Path, context: str, continuation: str) -> float:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, continuation))
    with torch.no_grad():
        log_p = model(torch.tensor([before + after])).logits[0].double().log_softmax(-1)
    return sum(log_p[len(before) + i - 1, token].item() for i, token in enumerate(after))


@pytest.mark.slow
def test_figures_are_those_of_plain_loops_and_it_goes_on(command, tiny_llama, tiny_moh):
    status, printed, record = command("--models", f"moh={tiny_moh}", f"same={tiny_llama}")
    assert status == 0, printed.err
    rows = {(row["benchmark"].removesuffix(" cloze"), row["model"]): row for row in record["rows"]}
    names = ["LAMBADA", "SciQ", "PIQA", "HellaSwag", "ARC-Easy", "WinoGrande", "BoolQ", "OpenBookQA"]
    assert len(rows) == 3 * 9 and {name for name, _ in rows} > {*names}
    assert printed.out.count("\n| ") == 3 * 9
    gained = []
    for row in DATA["EleutherAI__lambada_openai/default/test"]:
        before, _, word = row["text"].rpartition(" ")
        gained.append(log_likelihood(tiny_moh, before, f" {word}") - log_likelihood(tiny_llama, before, f" {word}"))
    found = rows["LAMBADA", "moh"]["nats"]
    assert found["value"] == pytest.approx(np.mean(gained), abs=1e-4)
    low, high = found["interval"]
    half = 1.96 * np.std(gained) / math.sqrt(ROWS)
    assert (low, high) == (
        pytest.approx(np.mean(gained) - half, abs=half / 3),
        pytest.approx(np.mean(gained) + half, abs=half / 3),
    )
    for (_, model), row in rows.items():
        if model == "same":
            assert row["nats"] == {"value": 0, "interval": [0, 0]}
            if "kept" in row:
                assert row["kept"]["value"] == pytest.approx(100)
        assert row["accuracy"]["interval"][0] <= row["accuracy"]["value"] <= row["accuracy"]["interval"][1]
    chance = {name: rows[name, "moh"]["accuracy"]["value"] - rows[name, "moh"]["margin"]["value"] for name in names}
    assert chance["LAMBADA"] == 0 and chance["PIQA"] == pytest.approx(50) and chance["SciQ"] == pytest.approx(25)
    # Again: nothing is scored anew.
    status, printed, again = command("--models", f"moh={tiny_moh}", f"same={tiny_llama}")
    assert status == 0 and again["rows"] == record["rows"] and "is kept from an earlier run" in printed.err


def test_a_base_at_chance_has_no_share():
    right = {"base": {"X": 0.9, "Y": 0.25}, "m": {"X": 0.7, "Y": 1.0}}

    def items(share: float) -> above_chance.Items:
        n = 200
        hits = np.arange(n) < share * n
        return above_chance.Items(hits.astype(float), np.full(n, 0.25), np.zeros(n))

    class Named:
        def __init__(self, name: str):
            self.name = name

    found = {label: {name: items(share) for name, share in of.items()} for label, of in right.items()}
    rows = above_chance.table(found, [Named("X"), Named("Y")])
    of_model = {row["benchmark"]: row for row in rows if row["model"] == "m"}
    assert list(of_model) == ["X", "Y", "mean of 2, 1 above chance"]
    assert of_model["X"]["kept"]["value"] == pytest.approx(100 * 0.45 / 0.65)
    assert "kept" not in of_model["Y"]
    assert of_model["mean of 2, 1 above chance"]["kept"]["value"] == pytest.approx(100 * 0.45 / 0.65)


def test_the_share_of_keys_that_is_read_is_a_plain_loops(paper_moh):
    """Heads that are off read nothing: of all heads, those that are on, of all earlier tokens."""
    model, tokenizer = MoHLlamaForCausalLM.from_pretrained(paper_moh).eval(), AutoTokenizer.from_pretrained(paper_moh)
    tokens = tokenizer("The river is by the mill. " * 8)["input_ids"]
    gates: list[torch.Tensor] = []
    for router in model.routers:
        router.register_forward_hook(lambda _, args, output: gates.append(output[1][0]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
        read = sum((gate[t] != 0).sum().item() * (t + 1) for gate in gates for t in range(len(tokens)))
        every = sum(gate.shape[-1] * (t + 1) for gate in gates for t in range(len(tokens)))
        assert above_chance.share_read(model, tokens) == pytest.approx(read / every) and 0 < read < every
