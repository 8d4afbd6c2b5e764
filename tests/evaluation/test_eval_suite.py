import statistics
from pathlib import Path

import pytest

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import SCRIPT_DATASETS, Benchmark, Suite, load_suite
from moh_llm.reading import read_yaml


def published_mean(suite: Suite, column: str) -> float:
    return statistics.fmean(benchmark.published[column] for benchmark in suite.benchmarks)


def test_paper_suite_is_the_papers_table() -> None:
    suite = load_suite("paper")
    assert len(suite.benchmarks) == 14
    assert round(published_mean(suite, "LLaMA3-8B"), 1) == 61.6
    assert round(published_mean(suite, "MoH-LLaMA3-8B"), 1) == 64.0
    assert [b.name for b in suite.benchmarks if "LLaMA3-8B stage 1" not in b.published] == ["C-Eval"]
    shots = {benchmark.name: benchmark.shots for benchmark in suite.benchmarks if benchmark.shots}
    five = dict.fromkeys(["MMLU", "C-Eval", "CMMLU"], 5)
    more = {"GSM8K": 8, "HellaSwag": 10, "BoolQ": 32, "Natural Questions": 32, "ARC-Challenge": 25}
    assert shots == five | more
    tasks = {benchmark.name: len(benchmark.expand()) for benchmark in suite.benchmarks}
    assert (tasks["MMLU"], tasks["C-Eval"], tasks["CMMLU"], tasks["TruthfulQA"]) == (57, 52, 67, 2)
    assert all("inferred" in benchmark.note for benchmark in suite.benchmarks)


def test_stage1_suite_is_the_papers_other_table() -> None:
    suite, paper = load_suite("paper_stage1"), load_suite("paper")
    names = [benchmark.name for benchmark in suite.benchmarks]
    assert len(names) == 14 and set(names) == {b.name for b in paper.benchmarks} - {"C-Eval"} | {"ARC-Easy"}
    assert round(published_mean(suite, "LLaMA3-8B stage 1"), 1) == 64.7
    assert round(published_mean(suite, "MoH-LLaMA3-8B"), 1) == 64.8
    assert all("inferred" in benchmark.note for benchmark in suite.benchmarks)


@pytest.mark.parametrize("name", ["paper", "paper_stage1", "scratch"])
def test_data_is_pinned(name: str) -> None:
    """By commit on the Hub, or, where the Hub has a loading script, by commit and hash elsewhere."""
    import re

    sources = read_yaml(SCRIPT_DATASETS)
    for benchmark in load_suite(name).benchmarks:
        source = sources.get(benchmark.dataset)
        assert (benchmark.revision is None) == (source is not None), benchmark.name
        assert re.fullmatch("[0-9a-f]{40}", source["revision"] if source else benchmark.revision or "")
        for split in benchmark.splits() if source else ():
            assert source["revision"] in source["files"][split]["address"]
            assert re.fullmatch("[0-9a-f]{64}", source["files"][split]["sha256"])


ENTRY = "name: A, shots: 0, metric: acc, task: a, stock: a.yaml, dataset: a/b, config: c, eval_split: test, items: 3"
GOOD = f"""
name: mine
title: Mine
benchmarks:
  - {{{ENTRY}}}
"""


def test_own_suite_by_path_with_a_borrowed_benchmark(tmp_path: Path) -> None:
    """It keeps the columns of the suite that borrows it."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"{GOOD}  - {{from: paper, name: SciQ}}\ncolumns: [MoH-LLaMA3-8B]\n")
    own, mine = load_suite(str(path)).benchmarks
    assert own.expand()[0].definition == "a.yaml"
    (theirs,) = [benchmark for benchmark in load_suite("paper").benchmarks if benchmark.name == "SciQ"]
    assert mine.published == {"MoH-LLaMA3-8B": 92.2}
    assert (mine.task, mine.shots, mine.revision) == (theirs.task, theirs.shots, theirs.revision)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("items: 3", "items: 3, metrik: acc", r"benchmark 1 has the unknown key 'metrik'; the keys are name, shots,"),
        ("shots: 0", "shots: none", r"benchmark 1 has shots = 'none': Input should be a valid integer"),
        ("shots: 0", "shots: 5", r"shots=5 excludes fewshot_split=None"),
        ("stock: a.yaml", "stock: a.yaml, definition: b.yaml", r"one of `stock`"),
        ("items: 3", "items: 3, published: {X: 1}", r"column 'X' is not in `columns`"),
        ("items: 3", "items: 3, average: sum", r"average = 'sum': Input should be 'items' or 'parts'"),
        ("items: 3", "items: 3, chance: 25.0", r"chance.* = 25.0: Input should be less than 1"),
        ("name: A, shots: 0", "from: paper, shots: 5, name: A", r"beside `from` only `name` is read"),
        (ENTRY, f"{ENTRY}}}\n  - {{{ENTRY.replace('name: A', 'name: B')}", r"task a is there twice; give one"),
        ("task: a,", "task: a, parts: [x, y],", r"suite mine: task a is there twice; give one another `task`"),
        (ENTRY, "from: paper, name: MLU", r"name='MLU' must be one of MMLU, "),
    ],
)
def test_bad_suites_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UserError, match=message):
        load_suite(str(path))


@pytest.mark.parametrize(
    "field", [{"task": "../x"}, {"config": "../x"}, {"dataset": "/etc"}, {"parts": ["a/../.."]}, {"eval_split": ".."}]
)
def test_names_that_leave_the_data_folder_are_refused(field: dict) -> None:
    plain = {"name": "n", "shots": 0, "metric": "acc", "task": "t", "dataset": "d", "config": "c", "eval_split": "s"}
    Benchmark(**plain, items=1, stock="x.yaml")
    with pytest.raises(UserError, match="would leave the data folder"):
        Benchmark(**(plain | field), items=1, stock="x.yaml")
