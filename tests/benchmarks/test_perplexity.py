"""The benchmark of several models on several texts, and the texts of languages and code."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import language_texts
import perplexity


def test_each_model_has_the_figures_it_has_alone(make_llama, convert, river, tmp_path, monkeypatch, capsys):
    base = make_llama(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, max_position_embeddings=256)
    for name, heads in (("three", "3"), ("two", "2")):
        flags = ["--num-active-heads", heads, "--heldout-tokens", "0", "--context", "64", "--calibration", str(river)]
        assert convert(base, tmp_path / name, *flags, "--calibration-tokens", "1024") == 0
    chosen = ["--documents", "6", "--last", "--tokens-per-document", "100"]

    def figures(*names: str) -> dict:
        models = [str(tmp_path / name) for name in names]
        words = ["perplexity.py", *models, "--base", str(base), "--text", str(river), *chosen]
        monkeypatch.setattr(sys, "argv", [*words, "--json", str(tmp_path / "found.json")])
        assert perplexity.main() == 0
        printed, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
        assert "6 documents" in printed and "; float32, " in printed
        assert found["compute_dtype"] == "float32"  # what auto stands for in tests
        return found["means"]

    both, alone = figures("three", "two"), figures("two")
    three, two = str(tmp_path / "three"), str(tmp_path / "two")
    assert both[two] == alone[two] and both.keys() == {three, two, "paper's layer"}
    assert 0 < both[three]["kl"] < both[two]["kl"]
    assert both["paper's layer"] != alone["paper's layer"]  # of as many heads as the first model has


def test_a_document_of_each_subject_and_module(tmp_path, monkeypatch, capsys):
    english = {"question": "Which is even?", "choices": ["1", "2", "3", "5"], "answer": 1}
    chinese = {"Question": "哪个\u2028是偶数", "A": "一", "B": "二", "C": "三", "D": "五", "Answer": "B"}
    rows = {"cais__mmlu": [english] * 2, "haonan-li__cmmlu": [chinese]}
    for name, own in rows.items():
        for subject in ("a", "b", "c"):
            path = tmp_path / "data" / name / subject / "test.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own), encoding="utf-8")
    words = ["language_texts.py", str(tmp_path / "out"), "--data-dir", str(tmp_path / "data")]
    monkeypatch.setattr(sys, "argv", words)
    assert language_texts.main() == 0

    def documents(name: str) -> list[str]:
        with (tmp_path / "out" / f"{name}.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line)["text"] for line in lines]

    question = "Which is even?\nA. 1\nB. 2\nC. 3\nD. 5\nAnswer: B"
    assert documents("english") == [f"{question}\n\n{question}"] * 3
    assert documents("chinese") == ["哪个\u2028是偶数\nA. 一\nB. 二\nC. 三\nD. 五\n答案: B"]
    assert len(documents("chinese_read")) == 2 and any("def dedent" in text for text in documents("code"))
    monkeypatch.setattr(sys, "argv", [*words[:2], "--data-dir", str(tmp_path)])
    assert language_texts.main() == 1
    assert "cais__mmlu has no SUBJECT/test.jsonl" in capsys.readouterr().err
