"""What the heads did on the benchmarks' text: the text, the record in the report, and failures that lose no score."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import read

from moh_llm.evaluation import evaluate
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.evaluate import ANALYSED_ITEMS, analyse_models, prompts
from moh_llm.evaluation.suite import SUITES, load_suite

pytest.importorskip("lm_eval")

DATA = SUITES / "smoke" / "moh-llm__smoke"
NAMES = ["Facts", "Stories", "Answers"]

Evaluate = Callable[..., int]


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., list[Any]]:
    """Benchmarks of a suite, by default smoke's, with tasks that nothing has used yet."""
    from moh_llm.evaluation.tasks import load_tasks

    count = iter(range(99))
    return lambda suite="smoke", data_dir=None: load_tasks(
        load_suite(str(suite)), tmp_path / f"tasks{next(count)}", data_dir
    )


def test_prompts_are_those_written_by_hand(load: Callable[..., list[Any]]) -> None:
    found = prompts(load(), items=5)
    facts = [f"{row['sentence']} {row['choices'][row['answer']]}" for row in rows("facts/test.jsonl")]
    told = [f"Story: {row['story']}\nEnding: {row['endings'][row['answer']]}" for row in rows("stories/test.jsonl")]
    shown = [f"Story: {row['story']}\nEnding: {row['endings'][row['answer']]}" for row in rows("stories/train.jsonl")]
    answered = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows("answers/train.jsonl")]
    asked = [f"Question: {row['question']}\nAnswer:" for row in rows("answers/test.jsonl")]
    assert found == {
        "Facts": facts[:5],
        "Stories": ["\n\n".join([*shown, story]) for story in told[:5]],
        "Answers": ["\n".join([*answered, question]) for question in asked[:5]],
    }
    assert [len(texts) for texts in prompts(load(), ANALYSED_ITEMS).values()] == [14, 10, 6]


def test_items_are_spread_over_tasks(load: Callable[..., list[Any]]) -> None:
    from moh_llm.evaluation.tasks import Loaded

    alone = prompts(load(), items=2)
    (facts, stories, answers) = load()
    joined = Loaded(facts.benchmark, facts.tasks + stories.tasks + answers.tasks, "")
    turns = [alone["Facts"][0], alone["Stories"][0], alone["Answers"][0], alone["Facts"][1]]
    assert prompts([joined], items=4) == {"Facts": turns}
    assert len(answers.tasks[0].instances) == 1 < 6
    assert prompts([joined], items=2) == {"Facts": turns[:2]}


@pytest.mark.slow
def test_the_command_records_it(smoke_report: Path, tiny_moh: Path, load: Callable[..., list[Any]]) -> None:
    from transformers import AutoTokenizer

    from moh_llm.analysis.heads import analyse
    from moh_llm.modeling import MoHLlamaForCausalLM

    said = (smoke_report / "err.txt").read_text(encoding="utf-8")
    assert said.index("[3/3] model: Answers") < said.index("analysis of model: loading")
    assert "analysis of base" not in said
    analysis = read(smoke_report / "report")["analysis"]
    model, tokenizer = MoHLlamaForCausalLM.from_pretrained(tiny_moh), AutoTokenizer.from_pretrained(tiny_moh)
    direct = {"model": analyse(model, tokenizer, prompts(load(), ANALYSED_ITEMS))}
    assert list(direct["model"]["head_load_by_text"]["load"]) == NAMES
    assert analysis["model"]["num_active"] == model.config.active_heads_per_layer
    for record in (analysis, direct):
        assert record["model"].pop("seconds")
    assert analysis == direct
    assert sorted(path.name for path in smoke_report.iterdir()) == ["err.txt", "out.txt", "report"]


def test_whatever_fails_loses_that_analysis_only(
    tiny_moh: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moh_llm.analysis import heads

    def fail(*_: Any) -> Any:
        raise Exception("bad")  # of no kind that could be named

    def run() -> dict[str, Any]:
        options = EvaluationConfig([*models.values()])
        return analyse_models(models, load_suite("smoke"), options, "cpu", "auto", said.append)

    models, said = {"one": str(tiny_moh), "two": str(tiny_moh), "dense": str(tiny_llama)}, []
    calls = iter(range(2))
    monkeypatch.setattr(heads, "analyse", lambda *_: {"head_load": {}} if next(calls) else fail())
    assert run() == {
        "one": {"error": "Exception: bad"},
        "two": {"head_load": {}},
    }  # a dense model has no heads to choose
    assert "analysis of one failed: Exception: bad" in said
    monkeypatch.setattr(evaluate, "load_tasks", fail)  # the benchmarks' text
    assert [found["error"] for found in run().values()] == ["Exception: bad"] * 2


def test_a_failed_analysis_is_named_and_repeated(
    tiny_moh: Path,
    tmp_path: Path,
    run_evaluate: Evaluate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from moh_llm.analysis import heads

    calls, analyse = [], heads.analyse

    def fail_first(model: Any, tokenizer: Any, texts: dict[str, list[str]]) -> dict[str, Any]:
        calls.append(list(texts))
        if len(calls) == 1:
            raise RuntimeError("out of\nmemory")
        return analyse(model, tokenizer, texts, tokens_per_text=32, lengths=[128])

    monkeypatch.setattr(heads, "analyse", fail_first)
    output = tmp_path / "report"
    words = [tiny_moh, "--suite", "smoke", "--limit", "1", "--device", "cpu", "--output-dir", output]
    assert run_evaluate(*words) == 0
    report = read(output)
    assert report["analysis"] == {"model": {"error": "RuntimeError: out of memory"}} and report["errors"] == []
    said = capsys.readouterr()
    assert "the analysis of model failed, its scores stand: RuntimeError: out of memory\n" in said.out
    assert "the same command with --overwrite repeats the analysis only" in said.out

    assert run_evaluate(*words, "--overwrite") == 0
    assert capsys.readouterr().err.count("is kept from an earlier run") == 3
    assert list(read(output)["analysis"]["model"]["head_load_by_text"]["load"]) == NAMES and calls == [NAMES] * 2
    assert not (tmp_path / "report.partial").exists()
