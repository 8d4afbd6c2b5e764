"""The smoke suite end to end, against plain loops over the same items, and lm-eval's own run."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moh_llm.commands import evaluate
from moh_llm.errors import UserError
from moh_llm.evaluation.suite import load_suite

pytest.importorskip("lm_eval")

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "moh_llm" / "evaluation" / "suites" / "smoke" / "moh-llm__smoke"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


class NaiveScorer:
    """One forward pass per question and choice: no batches, no cache, no lm-eval."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import moh_llm.modeling  # noqa: F401

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def logits(self, tokens: list[int]) -> Any:
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0].double()

    def log_likelihood(self, context: str, continuation: str) -> float:
        before, after = self.tokenizer.encode(context), self.tokenizer.encode(continuation)
        log_probs = self.logits(before + after).log_softmax(-1)
        return sum(log_probs[len(before) + i - 1, token].item() for i, token in enumerate(after))

    def choose(self, context: str, choices: list[str]) -> int:
        scores = [self.log_likelihood(context, " " + choice) for choice in choices]
        return scores.index(max(scores))

    def write(self, context: str, tokens: int) -> str:
        written = self.tokenizer.encode(context)
        start = len(written)
        for _ in range(tokens):
            written.append(int(self.logits(written)[-1].argmax()))
            if "\n" in self.tokenizer.decode(written[start:]) or written[-1] == self.tokenizer.eos_token_id:
                break
        return self.tokenizer.decode(written[start:], skip_special_tokens=True).split("\n")[0]


def naive_smoke(folder: Path) -> dict[str, list[float]]:
    """Item scores of the smoke suite, prompts written out by hand."""
    scorer = NaiveScorer(folder)
    facts = [float(scorer.choose(row["sentence"], row["choices"]) == row["answer"]) for row in rows("facts/test.jsonl")]
    shown = "".join(
        f"Story: {row['story']}\nEnding: {row['endings'][row['answer']]}\n\n" for row in rows("stories/train.jsonl")
    )
    stories = [
        float(scorer.choose(f"{shown}Story: {row['story']}\nEnding:", row["endings"]) == row["answer"])
        for row in rows("stories/test.jsonl")
    ]
    shown = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n" for row in rows("answers/train.jsonl"))
    answers = []
    for row in rows("answers/test.jsonl"):
        words = re.findall(r"\w+", scorer.write(f"{shown}Question: {row['question']}\nAnswer:", 6))
        answers.append(float(bool(words) and words[0].lower() == row["answer"]))
    return {"Facts": facts, "Stories": stories, "Answers": answers}


@pytest.fixture(scope="module")
def report_folder(tiny_llama: Path, tiny_moh: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes for the tiny models."""
    output = tmp_path_factory.mktemp("report") / "out"
    command = [sys.executable, "evaluate.py", str(tiny_moh), "--base", str(tiny_llama), "--suite", "smoke"]
    done = subprocess.run(
        [*command, "--batch-size", "3", "--output", str(output)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "| Facts | 0 | acc | 14 |" in done.stdout
    assert "[3/3] model: Answers" in done.stderr
    return output


def test_scores_equal_a_naive_loop(tiny_llama: Path, tiny_moh: Path) -> None:
    from moh_llm.evaluation.runner import score

    folders = {"base": tiny_llama, "model": tiny_moh}
    found = score({label: str(f) for label, f in folders.items()}, load_suite("smoke"), batch_size=3, device="cpu")
    for label, folder in folders.items():
        expected = naive_smoke(folder)
        assert {name: result.strata for name, result in found[label].scores.items()} == {
            name: [values] for name, values in expected.items()
        }
        assert 0 < sum(expected["Facts"]) < len(expected["Facts"])
    assert found["base"].scores["Facts"].strata != found["model"].scores["Facts"].strata or (
        found["base"].scores["Stories"].strata != found["model"].scores["Stories"].strata
    )


def test_report_json(report_folder: Path, tiny_moh: Path) -> None:
    report = json.loads((report_folder / "report.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in report["benchmarks"]] == ["Facts", "Stories", "Answers"]
    for row in report["benchmarks"]:
        assert row["delta"]["value"] == pytest.approx(row["model"]["value"] - row["base"]["value"])
        for figures in (row["base"], row["model"]):
            (task,) = figures["tasks"].values()  # lm-eval's own figure
            assert figures["value"] == task["value"] and figures["items"] == task["items"] == row["items_in_full"]
    values = [row["model"]["value"] for row in report["benchmarks"]]
    assert report["average"]["model"]["value"] == pytest.approx(sum(values) / 3)
    assert report["limit"] is None and report["errors"] == [] and report["partial_data"] == []
    assert set(report["versions"]) == {"moh_llm", "torch", "transformers", "lm_eval", "datasets", "python"}
    assert "--suite smoke" in report["command"]
    assert report["models"]["model"]["records"] == [str(tiny_moh / "conversion.json")]


def test_report_markdown(report_folder: Path) -> None:
    page = (report_folder / "report.md").read_text(encoding="utf-8")
    assert "| benchmark | shots | metric | items | base | model | delta | recovery % |" in page
    assert "NOT COMPARABLE" not in page and "FAILED" not in page


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    parsed = parser.parse_args(list(words))
    parsed.command_line = " ".join(["moh-llm", "evaluate", *words])  # as the command line would set it
    return parsed


def test_a_failed_benchmark_does_not_lose_the_others(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.models.huggingface import HFLM

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(HFLM, "generate_until", fail)
    output = tmp_path / "report"
    status = evaluate.run(
        arguments(str(tiny_llama), "--suite", "smoke", "--limit", "2", "--device", "cpu", "--output", str(output))
    )
    assert status == 1
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert report["errors"] == [{"model": "model", "benchmark": "Answers", "error": "RuntimeError: out of\nluck"}]
    assert (report["average"]["over"], report["average"]["of"]) == (2, 3)
    page = capsys.readouterr().out
    assert "NOT COMPARABLE: --limit 2" in page
    assert "**FAILED: Answers on model (RuntimeError: out of luck).**" in page
    assert "average of 2 of 3" in page


def test_cut_prompts_are_reported(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    short = tmp_path / "short"
    shutil.copytree(tiny_llama, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200}))
    words = [str(short), "--suite", "smoke", "--limit", "1", "--device", "cpu", "--output", str(tmp_path / "report")]
    assert evaluate.run(arguments(*words)) == 0
    assert (
        "Prompts longer than model's context of 200 tokens lost their beginning in Stories" in capsys.readouterr().out
    )


def test_what_can_be_refused_is_refused_first(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty; pass --overwrite"):
        evaluate.run(arguments(str(tiny_llama), "--suite", "smoke", "--output", str(tmp_path / "full")))
    with pytest.raises(UserError, match=r"data folder .* lacks MMLU"):
        evaluate.run(arguments(str(tiny_llama), "--data-dir", str(tmp_path), "--output", str(tmp_path / "out")))
    with pytest.raises(UserError, match="torch cannot use it"):
        evaluate.run(
            arguments(str(tiny_llama), "--suite", "smoke", "--device", "gpu", "--output", str(tmp_path / "out"))
        )


@pytest.mark.parametrize("words", [["--limit", "0"], ["--limit", "2.5"], ["--batch-size", "many"]])
def test_bad_numbers_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("model", *words)


def test_several_processes_are_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moh_llm.evaluation.runner import score

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process"):
        score({"model": str(tiny_llama)}, load_suite("smoke"))


def test_scores_equal_lm_evals_own_run(tiny_llama: Path, tmp_path: Path, shared_benchmarks: Path) -> None:
    """Tasks of every kind: shots, splits and metrics as lm-eval's `simple_evaluate` runs the stock files."""
    import dataclasses

    import lm_eval
    import yaml
    from lm_eval.tasks import TaskManager

    from moh_llm.evaluation.runner import score

    names = ["MMLU", "GSM8K", "TruthfulQA", "HellaSwag", "BoolQ", "LAMBADA", "WinoGrande", "Natural Questions"]
    suite = load_suite("paper")
    chosen = [benchmark for benchmark in suite.benchmarks if benchmark.name in names]
    chosen = [dataclasses.replace(b, parts=["anatomy", "virology"]) if b.name == "MMLU" else b for b in chosen]
    suite = dataclasses.replace(suite, benchmarks=chosen)
    ours = score({"model": str(tiny_llama)}, suite, shared_benchmarks, limit=3, device="cpu")["model"]
    assert not ours.errors

    tasks = Path(lm_eval.__file__).parent / "tasks"
    expected = {}
    for benchmark in chosen:
        for part in benchmark.expand():
            folder = shared_benchmarks / benchmark.dataset.replace("/", "__") / part.config
            files = {file.stem: str(file) for file in folder.glob("*.jsonl")}
            stock = {"include": str(tasks / part.definition), "dataset_path": "json"}
            stock |= {"task": part.task, "dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")}}
            (tmp_path / f"{part.task}.yaml").write_text(yaml.safe_dump(stock))
            expected[part.task] = benchmark
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for task, benchmark in expected.items():
        theirs = lm_eval.simple_evaluate(
            "hf",
            model_args={"pretrained": str(tiny_llama)},
            tasks=[task],
            num_fewshot=benchmark.shots,
            batch_size=8,
            device="cpu",
            limit=3,
            task_manager=manager,
            bootstrap_iters=0,
        )
        key = f"{benchmark.metric},{benchmark.filter}"
        assert ours.scores[benchmark.name].tasks[task] == (theirs["results"][task][key], 3)


def test_report_may_not_replace_the_model(tiny_llama: Path) -> None:
    words = [str(tiny_llama), "--suite", "smoke", "--output", str(tiny_llama), "--overwrite"]
    with pytest.raises(UserError, match="which is read; name another folder"):
        evaluate.run(arguments(*words))
    assert (tiny_llama / "model.safetensors").exists()
