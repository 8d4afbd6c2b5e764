"""What the heads did on the benchmarks' text: the text, the record in the report, and failures that lose no score."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import read

from moh_llm.evaluation import evaluate
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


def test_text_that_cannot_be_built_leaves_the_others(load: Callable[..., list[Any]]) -> None:
    def fail(**_: Any) -> None:
        raise LookupError("no\nfield")

    loaded, said = load(), []
    loaded[1].tasks[0].build_all_requests = fail
    assert list(prompts(loaded, 2, said.append)) == ["Facts", "Answers"]
    assert said == ["the text of Stories is left out: LookupError: no field"]


SUITE = """
name: some
title: Some of each kind
benchmarks:
  - {from: paper, name: WinoGrande}
  - {from: paper, name: HellaSwag}
  - {from: paper, name: Natural Questions}
  - {from: paper, name: TruthfulQA}
"""


def test_prompts_are_those_that_lm_eval_builds(
    load: Callable[..., list[Any]], tmp_path: Path, shared_benchmarks: Path
) -> None:
    """With drawn examples, and with the choices in the question."""
    (tmp_path / "some.yaml").write_text(SUITE)
    found = prompts(load(tmp_path / "some.yaml", shared_benchmarks), items=4)
    right_answers = {"WinoGrande": lambda doc: int(doc["answer"]) - 1, "HellaSwag": lambda doc: int(doc["label"])}
    for loaded in load(tmp_path / "some.yaml", shared_benchmarks):
        name, each = loaded.benchmark.name, 4 // len(loaded.tasks)
        texts = []
        for task in loaded.tasks:
            task.set_fewshot_seed(1234)
            task.build_all_requests(limit=each, rank=0, world_size=1)
            for number in range(each):
                requests = [request for request in task.instances if request.doc_id == number]
                # Of TruthfulQA's choices the first is right.
                right = right_answers.get(name, lambda doc: 0)(requests[0].doc)
                context, continuation = requests[right].args
                texts.append(context if name == "Natural Questions" else context + continuation)
        assert found[name] == (texts if name != "TruthfulQA" else [texts[n] for n in (0, 2, 1, 3)])
        if name == "WinoGrande":
            doc = loaded.tasks[0].task_docs[0]
            assert found[name][0] == doc["sentence"].replace("_", doc[f"option{doc['answer']}"])


@pytest.mark.slow
def test_the_command_records_it(smoke_report: Path, tiny_moh: Path, load: Callable[..., list[Any]]) -> None:
    from transformers import AutoTokenizer

    from moh_llm.analysis.record import analyse
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


def test_models_without_a_choice_are_passed_over(tiny_llama: Path, paper_moh: Path, tmp_path: Path) -> None:
    """And then no text is read."""
    whole = shutil.copytree(paper_moh, tmp_path / "whole")
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"num_active_heads": 8}))
    said: list[str] = []
    models = {"base": str(tiny_llama), "whole": str(whole)}
    assert analyse_models(models, load_suite("paper"), tmp_path / "nowhere", "cpu", "auto", said.append) == {}
    assert said == []


@pytest.mark.parametrize("failing", ["one", "config", "text", "no text"])
def test_whatever_fails_loses_that_analysis_only(
    tiny_moh: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The analysis of one model, whether a model chooses, the benchmarks' text: nothing that fails ends the run."""

    from moh_llm.analysis import record

    def fail(*_: Any) -> Any:
        raise Exception("bad")  # of no kind that could be named

    models = {"one": str(tiny_moh), "two": str(tiny_moh), "dense": str(tiny_llama)}
    calls = iter(range(2))
    monkeypatch.setattr(
        record, "analyse", lambda *_: fail() if next(calls) == 0 and failing == "one" else {"head_load": {}}
    )
    if failing == "config":
        models["one"] = str(tmp_path)
    if failing == "text":
        monkeypatch.setattr(evaluate, "load_tasks", fail)
    if failing == "no text":
        monkeypatch.setattr(evaluate, "prompts", lambda *_, **__: {})
    said: list[str] = []
    found = analyse_models(models, load_suite("smoke"), None, "cpu", "auto", said.append)
    errors = {label: record["error"] for label, record in found.items() if "error" in record}
    expected = {
        "one": "Exception: bad",
        "config": "Unrecognized model",
        "text": "Exception: bad",
        "no text": "no benchmark's text can be built; the lines above say why",
    }[failing]
    assert list(found) == ["one", "two"] and "dense" not in found
    assert list(errors) == (["one"] if failing in ("one", "config") else ["one", "two"])
    assert all(expected in error and "\n" not in error for error in errors.values())
    assert f"analysis of one failed: {errors['one']}" in said


def test_a_failed_analysis_is_named_and_repeated(
    tiny_moh: Path,
    tmp_path: Path,
    run_evaluate: Evaluate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from moh_llm.analysis import record

    calls, analyse = [], record.analyse

    def fail_first(model: Any, tokenizer: Any, texts: dict[str, list[str]]) -> dict[str, Any]:
        calls.append(list(texts))
        if len(calls) == 1:
            raise RuntimeError("out of\nmemory")
        return analyse(model, tokenizer, texts, tokens_per_text=32, lengths=[128])

    monkeypatch.setattr(record, "analyse", fail_first)
    output = tmp_path / "report"
    words = [tiny_moh, "--suite", "smoke", "--limit", "1", "--device", "cpu", "--output", output]
    assert run_evaluate(*words) == 0
    report = read(output)
    assert report["analysis"] == {"model": {"error": "RuntimeError: out of memory"}} and report["errors"] == []
    said = capsys.readouterr()
    assert "the analysis of model failed, its scores stand: RuntimeError: out of memory\n" in said.out
    assert "the same command with --overwrite repeats the analysis only" in said.out

    assert run_evaluate(*words, "--overwrite") == 0
    assert "7 answers are kept from an earlier run" in capsys.readouterr().err
    assert list(read(output)["analysis"]["model"]["head_load_by_text"]["load"]) == NAMES and calls == [NAMES] * 2
    assert not (tmp_path / "report.partial").exists()
