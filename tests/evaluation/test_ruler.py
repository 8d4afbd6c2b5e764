"""RULER's prompts fit into their lengths and are the same in every process, and its suite runs end to end."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import save_byte_tokenizer

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import load_suite

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

# One of each of lm-eval's generators, and one whose needles lie in a text; lengths that tokens of one byte allow.
SUITE = """
name: short
title: Short prompts
benchmarks:
"""
ENTRY = """  - {name: %s, shots: 0, metric: recall, task: %s, stock: ruler/%s.yaml, dataset: a, config: b,
     eval_split: test, items: 500, chance: %s, lengths: [%s]}
"""
PROMPTS = """
import json, sys, tempfile
from pathlib import Path
from moh_llm.evaluation.ruler import prepare
from moh_llm.evaluation.suite import load_suite
from moh_llm.evaluation.tasks import load_tasks, quiet
suite = prepare(load_suite(sys.argv[1]), [sys.argv[2]], print)
with tempfile.TemporaryDirectory() as folder:
    loaded = load_tasks(suite, Path(folder), None, int(sys.argv[3]))
found = {}
for one in loaded:
    with quiet():
        one.tasks[0].build_all_requests(rank=0, world_size=1)
    requests = [request for request in one.tasks[0].instances]
    found[one.benchmark.name] = [[*r.args, r.doc["outputs"], chance] for r, chance in zip(requests, one.chances[0])]
print(json.dumps(found))
"""


def write_suite(path: Path, *entries: tuple[object, ...]) -> Path:
    path.write_text(SUITE + "".join(ENTRY % entry for entry in entries))
    return path


@pytest.mark.slow
def test_prompts_repeat_and_fit(tmp_path: Path) -> None:
    """In two processes that hash unlike; the first prompts do not depend on how many there are."""
    save_byte_tokenizer(tmp_path)
    # At 1,360 bytes the next longer prompt fits only if the beginning of its answer is not counted.
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    single, text = (
        ("A", "niah_single_1", "niah_single_1", 0, 1360),
        ("B", "niah_multikey_1", "niah_multikey_1", 0, 4096),
    )
    frequent = ("D", "ruler_fwe", "fwe", "words", 2048)
    suite = write_suite(tmp_path / "s.yaml", single, text, ("C", "ruler_cwe", "cwe", "words", 3072), frequent)
    outputs = []
    for hash_seed, items in (("1", 3), ("2", 2)):
        words = [sys.executable, "-c", PROMPTS, str(suite), str(tmp_path), str(items)]
        run = subprocess.run(
            words, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        )
        outputs.append(json.loads(run.stdout.splitlines()[-1]))
    longer, shorter = outputs
    assert {name: prompts[:2] for name, prompts in longer.items()} == shorter
    for name, prompts in longer.items():
        length = int(name.split()[1])
        assert len({prompt for prompt, *_ in prompts}) == len(prompts) == 3
        for prompt, how, answers, chance in prompts:
            assert 0.4 * length < len(prompt.encode()) + how["max_gen_toks"] <= length
            assert all(answer in prompt for answer in answers)
            assert 0.2 < chance < 0.9 if name[0] in "CD" else chance == 0


@pytest.mark.slow
def test_two_tasks_end_to_end(
    tiny_llama: Path,
    tiny_moh: Path,
    run_evaluate: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Base and model answer the same prompts; those that are too long for them are left out, with a line."""
    from lm_eval.models.huggingface import HFLM

    asked: list[list[str]] = []
    generate = HFLM.generate_until

    def answer(self: HFLM, requests: list, disable_tqdm: bool = False) -> list[str]:
        asked.append([request.args[0] for request in requests])
        assert len(generate(self, requests, disable_tqdm)) == len(requests)
        # The base finds every answer; the model one of two.
        return [" ".join(r.doc["outputs"]) if len(asked) < 3 or r.doc_id else "?" for r in requests]

    monkeypatch.setattr(HFLM, "generate_until", answer)
    lengths = (1024, "1024, 4096")
    suite = write_suite(
        tmp_path / "s.yaml",
        *(("AB"[n], f"niah_{t}", f"niah_{t}", 0, lengths[n]) for n, t in enumerate(("single_1", "multikey_2"))),
    )
    words = [tiny_moh, "--base", tiny_llama, "--suite", suite, "--limit", "2", "--no-analysis", "--device", "cpu"]
    assert run_evaluate(*words, "--output-dir", tmp_path / "report") == 0
    assert asked[:2] == asked[2:] and len(asked) == 4
    assert "prompts of more than 2,048 tokens, the context of a model, are left out" in capsys.readouterr().err
    record = json.loads((tmp_path / "report" / "report.json").read_text())
    rows = {row["name"]: row for row in record["benchmarks"]}
    assert list(rows) == ["A 1024", "B 1024"] and record["data"] == "made, with needles in the text of python_topics"
    for row in rows.values():
        assert row["data_sha256"] and row["dataset"] == "python_topics"
        assert [row["scores"][label]["value"] for label in ("base", "model")] == [100, 50]
        assert row["scores"]["model"]["delta"]["value"] == -50


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moh_llm.evaluation.ruler import prepare

    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ruler.niah_utils", None)
    with pytest.raises(UserError, match=r'^RULER needs wonderwords and nltk: pip install "lm-eval\[ruler\]"$'):
        prepare(load_suite("ruler"), [str(tmp_path)], print)


def test_shorter_prompts_are_of_the_same_tasks() -> None:
    found = load_suite(str(Path(__file__).parents[2] / "benchmarks" / "ruler_2k.yaml")).benchmarks
    known = {one.name: one for one in load_suite("ruler").benchmarks}
    assert len(found) == 5
    for one in found:
        task = one.name.removesuffix(" 2048")
        same = {"name": one.name, "task": one.task, "lengths": one.lengths}
        assert one == dataclasses.replace(known[f"{task} 4096"], **same) and one.lengths == [2048]
