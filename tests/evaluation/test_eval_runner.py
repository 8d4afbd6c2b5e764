"""The smoke suite end to end, against plain loops over the same items."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moh_llm.errors import UserError
from moh_llm.evaluation.config import EvaluationConfig
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


def naive_smoke(folder: Path, limit: int) -> dict[str, list[float]]:
    """Scores of the smoke suite's first items, prompts written out by hand."""
    scorer = NaiveScorer(folder)
    facts = [
        float(scorer.choose(row["sentence"], row["choices"]) == row["answer"])
        for row in rows("facts/test.jsonl")[:limit]
    ]
    shown = "".join(
        f"Story: {row['story']}\nEnding: {row['endings'][row['answer']]}\n\n" for row in rows("stories/train.jsonl")
    )
    stories = [
        float(scorer.choose(f"{shown}Story: {row['story']}\nEnding:", row["endings"]) == row["answer"])
        for row in rows("stories/test.jsonl")[:limit]
    ]
    shown = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n" for row in rows("answers/train.jsonl"))
    answers = []
    for row in rows("answers/test.jsonl")[:limit]:
        words = re.findall(r"\w+", scorer.write(f"{shown}Question: {row['question']}\nAnswer:", 6))
        answers.append(float(bool(words) and words[0].lower() == row["answer"]))
    return {"Facts": facts, "Stories": stories, "Answers": answers}


def test_scores_equal_a_naive_loop(tiny_llama: Path, tiny_moh: Path, paper_moh: Path, tmp_path: Path) -> None:
    from moh_llm.evaluation.processes import Finished
    from moh_llm.evaluation.runner import score

    finished = Finished(tmp_path / "kept")
    folders = {"base": tiny_llama, "model": tiny_moh, "paper": paper_moh}
    models = {label: str(folder) for label, folder in folders.items()}
    options = EvaluationConfig([*models.values()], limit=5, batch_size=3, device="cpu", log_samples=True)
    found = score(models, load_suite("smoke"), options, finished=finished)
    row, likelihoods = rows("facts/test.jsonl")[0], []
    for label, folder in folders.items():
        expected = naive_smoke(folder, 5)
        assert {name: result.strata for name, result in found[label].scores.items()} == {
            name: [values] for name, values in expected.items()
        }
        assert 0 < sum(expected["Facts"]) < len(expected["Facts"])
        # Choices may fall alike; likelihoods do not.
        item = json.loads(finished.file(label, "Facts").read_text(encoding="utf-8").splitlines()[1])
        likelihoods.append([response[0][0] for response in item["resps"]])
        scorer = NaiveScorer(folder)
        by_hand = [scorer.log_likelihood(row["sentence"], " " + choice) for choice in row["choices"]]
        assert likelihoods[-1] == pytest.approx(by_hand, abs=1e-3)
    for one, other in itertools.combinations(likelihoods, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.01


Evaluate = Callable[..., int]


def test_a_failed_benchmark_does_not_lose_the_others(
    tiny_llama: Path,
    tmp_path: Path,
    run_evaluate: Evaluate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lm_eval.models.huggingface import HFLM

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(HFLM, "generate_until", fail)
    output = tmp_path / "report"
    words = [tiny_llama, "--suite", "smoke", "--limit", "2", "--device", "cpu", "--output-dir", output]
    assert run_evaluate(*words) == 1
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert report["errors"] == [{"model": "model", "benchmark": "Answers", "error": "RuntimeError: out of\nluck"}]
    assert (report["average"]["over"], report["average"]["total"]) == (2, 3)
    page = capsys.readouterr().out
    assert "scores only Answers again" in page
    assert "NOT COMPARABLE: --limit 2" in page
    assert "FAILED: Answers on model (RuntimeError: out of luck)." in page
    assert "average of 2 of 3" in (tmp_path / "report" / "report.md").read_text()

    monkeypatch.undo()
    assert run_evaluate(*words, "--overwrite") == 0
    said = capsys.readouterr()
    assert said.err.count("is kept from an earlier run") == 2 and "FAILED" not in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_cut_prompts_are_reported_by_the_function_behind_the_command(tiny_llama: Path, tmp_path: Path) -> None:
    from moh_llm.evaluation.config import EvaluationConfig
    from moh_llm.evaluation.evaluate import evaluate

    short, output = shutil.copytree(tiny_llama, tmp_path / "short"), tmp_path / "report"
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200}))
    evaluation = evaluate(EvaluationConfig([short], output, suite="smoke", limit=1, device="cpu"), say=print)
    assert (evaluation.folder, evaluation.partial, evaluation.failed_benchmarks) == (output, None, [])
    assert [row.scores["model"].truncated for row in evaluation.record.benchmarks] == [False, True, False]
    warning = "Prompts longer than model's context of 200 tokens lost their beginning in Stories"
    assert warning in (output / "report.md").read_text(encoding="utf-8")


def test_what_can_be_refused_is_refused_first(tiny_llama: Path, tmp_path: Path, run_evaluate: Evaluate) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    smoke = ["--suite", "smoke", "--output-dir"]
    for words, message in (
        ([*smoke, tmp_path / "full"], "is not empty; pass --overwrite"),
        ([*smoke, tiny_llama, "--overwrite"], "which is an input; name another folder"),
        (["--suite", "no", "--output-dir", tmp_path / "out"], r"--suite no: unknown"),
        ([*smoke, tmp_path / "out", "--device", "gpu"], "torch cannot use it"),
    ):
        with pytest.raises(UserError, match=message):
            run_evaluate(tiny_llama, *words)
    assert (tiny_llama / "model.safetensors").exists()


def test_several_models_and_the_log_of_items(
    tiny_llama: Path, tiny_moh: Path, tmp_path: Path, run_evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = [tmp_path / run / "model" for run in ("one", "two")]
    for copy in copies:
        shutil.copytree(tiny_moh, copy)
    output = tmp_path / "report"
    words = [*copies, "--base", tiny_llama, "--suite", "smoke", "--limit", "3", "--device", "cpu", "--log-samples"]
    assert run_evaluate(*words, "--batch-size", "auto", "--no-analysis", "--output-dir", output) == 0
    assert "analysis" not in capsys.readouterr().err
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert list(report["models"]) == ["base", "one-model", "two-model"] and report["analysis"] == {}
    for row in report["benchmarks"]:
        scores = row["scores"]
        base, one, two = (scores[label]["value"] for label in ("base", "one-model", "two-model"))
        assert one == two  # the same files
        assert scores["two-model"]["delta"]["value"] == pytest.approx(two - base)
        for label in report["models"]:
            file = output / "samples" / label / f"{row['name']}.jsonl"
            log = [json.loads(line) for line in file.read_text().splitlines()]
            assert [item["doc_id"] for item in log] == [0, 1, 2]
            assert sum(item["score"] for item in log) / 3 * 100 == pytest.approx(scores[label]["value"])
            assert all(item["arguments"][0][0] and len(item["prompt_hash"]) == 64 for item in log)
    facts = json.loads((output / "samples" / "base" / "Facts.jsonl").read_text().splitlines()[0])
    first = rows("facts/test.jsonl")[0]
    assert facts["target"] == first["answer"] and facts["doc"]["sentence"] == first["sentence"]
    assert facts["arguments"] == [[first["sentence"], f" {choice}"] for choice in first["choices"]]


def test_scores_that_are_no_numbers_fail(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.task import ConfigurableTask

    from moh_llm.evaluation.runner import score

    monkeypatch.setattr(ConfigurableTask, "process_results", lambda *_: {"acc": float("nan")})
    options = EvaluationConfig(str(tiny_llama), limit=2, device="cpu")
    found = score({"model": str(tiny_llama)}, load_suite("smoke"), options)["model"]
    assert "item 0 first" in found.errors["Facts"]


@pytest.mark.slow
def test_models_are_computed_in_one_dtype(
    tiny_llama: Path, tmp_path: Path, run_evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's, whatever they are stored in."""
    from transformers import AutoModelForCausalLM

    from moh_llm.evaluation import runner

    loaded, whole = [], runner.run_benchmark
    monkeypatch.setattr(
        runner, "run_benchmark", lambda lm, *rest: (loaded.append(str(lm.model.dtype)), whole(lm, *rest))[1]
    )
    half = shutil.copytree(tiny_llama, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(half).half().save_pretrained(half)
    words = [half, "--base", tiny_llama, "--suite", "smoke", "--limit", "1", "--device", "cpu"]
    monkeypatch.setenv("MOH_LLM_COMPUTE_DTYPE", "bfloat16")
    assert run_evaluate(*words, "--output-dir", tmp_path / "report") == 0
    assert loaded == ["torch.bfloat16"] * 6
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [report["dtype"], *(about["dtype"] for about in report["models"].values())] == ["bfloat16"] * 3
