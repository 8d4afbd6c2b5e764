"""From suite to lm-eval tasks: data that is missing, damaged or whole, and rows that cannot be scored."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import SUITES, load_suite
from moh_llm.evaluation.tasks import Loaded, hash_definition, load_tasks, read_splits, write_task_files

pytest.importorskip("lm_eval")

Row = dict[str, Any]
Load = Callable[..., list[Loaded]]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder of a copy of the smoke suite, which may be changed: its tasks, and `data` with its data."""
    shutil.copytree(SUITES / "smoke", tmp_path / "smoke")
    shutil.copy(SUITES / "smoke.yaml", tmp_path / "own.yaml")
    (tmp_path / "data").symlink_to(tmp_path / "smoke" / "moh-llm__smoke")
    return tmp_path


@pytest.fixture
def load(own: Path) -> Load:
    """Load the smoke suite as it was changed."""
    count = iter(range(99))
    return lambda limit=None: load_tasks(load_suite(str(own / "own.yaml")), own / f"tasks{next(count)}", None, limit)


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_missing_data_is_named_in_one_line(own: Path, load: Load) -> None:
    (own / "data" / "facts" / "test.jsonl").unlink()
    (own / "data" / "stories" / "train.jsonl").write_text("")
    with pytest.raises(UserError, match=r"Facts \(.*facts/test.jsonl does not exist\), Stories \(.* holds no rows\)$"):
        load()


def test_a_chance_rule_that_does_not_go_with_the_metric_is_named(own: Path, load: Load) -> None:
    change(own / "own.yaml", "chance: 0", "chance: choices")
    with pytest.raises(UserError, match=r"Answers \(chance: choices does not go with exact_match"):
        load()


def test_whatever_a_definition_raises_is_one_line(own: Path, load: Load) -> None:
    (own / "smoke" / "own.py").write_text("def text(row):\n    assert False, 'not\\nready'\n")
    change(own / "smoke" / "facts.yaml", '"{{sentence}}"', "!function own.text")
    with pytest.raises(UserError, match=r"Facts \(.*AssertionError: not ready\)$"):
        load()


def test_task_files_for_the_hub(tmp_path: Path) -> None:
    """The Hub's paths stay, and the pinned commit is asked for."""
    write_task_files(load_suite("paper"), tmp_path, None)
    assert len(list(tmp_path.glob("*.yaml"))) == 188
    gsm8k, sciq = (yaml.safe_load((tmp_path / f"{name}.yaml").read_text("utf-8")) for name in ("gsm8k", "sciq"))
    assert gsm8k["num_fewshot"] == 8 and "dataset_path" not in gsm8k
    assert sciq["dataset_kwargs"] == {"revision": "2c94ad3e1aafab77146f384e23536f97a4849815"}


@pytest.mark.parametrize(
    ("error", "message", "asked"),
    [
        (RuntimeError("no such file"), r"--data-dir .*: SciQ \(allenai/sciq: .*no such file\), PIQA \(baber/piqa", 2),
        (ConnectionError("Couldn't reach the Hub"), "reach the Hub; give the data as files with --data-dir", 1),
    ],
)
def test_refusals_of_the_hub(
    error: Exception, message: str, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named together; a Hub that cannot be reached is asked once."""
    import datasets

    suite = tmp_path / "hub.yaml"
    suite.write_text("name: h\ntitle: H\nbenchmarks: [{from: paper, name: SciQ}, {from: paper, name: PIQA}]\n")
    paths = []

    def refuse(path: str, **_: object) -> None:
        paths.append(path)
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=message):
        load_tasks(load_suite(str(suite)), tmp_path / "tasks", None)
    assert len(paths) == asked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "paper_stage1", "scratch"])
def test_every_task_reads_local_data_and_builds_a_prompt(name: str, tmp_path: Path, shared_benchmarks: Path) -> None:
    """Of the other suites, those that are not as in the paper's."""
    suite = load_suite(name)
    if name != "paper":
        known = [dataclasses.replace(benchmark, published={}) for benchmark in load_suite("paper").benchmarks]
        others = [b for b in suite.benchmarks if dataclasses.replace(b, published={}) not in known]
        assert 0 < len(others) < len(suite.benchmarks)
        suite = dataclasses.replace(suite, benchmarks=others)
    for loaded in load_tasks(suite, tmp_path, shared_benchmarks):
        benchmark = loaded.benchmark
        assert [task.config.task for task in loaded.tasks] == [part.task for part in benchmark.expand()]
        for task in loaded.tasks:
            assert task.config.num_fewshot == benchmark.shots
            assert benchmark.metric in task.aggregation()
            task.set_fewshot_seed(1234)
            task.build_all_requests(limit=1, rank=0, world_size=1)
            assert task.instances[0].args[0].strip()
            if benchmark.shots:
                assert (task.fewshot_cfg.split or task.config.training_split) == benchmark.fewshot_split


CHANGES: list[tuple[str, int, Row, str]] = [
    ("facts/test", 5, {"sentence": None}, r"Facts \(facts/test: row 5: UndefinedError: 'sentence' is undefined\)"),
    ("facts/test", 3, {"answer": "b"}, "facts/test.jsonl does not hold rows of the same fields: ArrowInvalid: "),
    ("facts/test", 2, {"sentence": "1984"}, "row 2: its question is 1984, which lm-eval does not take for text"),
    ("stories/train", 2, {"endings": ["Only one."]}, "stories/train: row 2: the answer 1 is none of the 1 choices"),
]


@pytest.mark.parametrize(("file", "number", "damage", "message"), CHANGES)
def test_bad_rows_are_named(own: Path, load: Load, file: str, number: int, damage: Row, message: str) -> None:
    """With a limit before the row, it does not matter."""
    path = own / "data" / f"{file}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[number - 1] |= damage
    rows[0]["source"] = "somewhere"  # a field that no prompt shows may be missing in others
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=message) as caught:
        load()
    assert "\n" not in str(caught.value) and "fix the files" in str(caught.value)
    if "test" in file and "same fields" not in message:
        load(limit=number - 1)
    from lm_eval.utils import env

    assert "from_string" not in vars(env)  # lm-eval is left as it was


MMLU = {"question": "Which is even?", "choices": ["1", "2", "3", "5"], "answer": 1}
WINOGRANDE = {"sentence": "The _ barked.", "option1": "dog", "option2": "cat", "answer": "1"}
ARC: Row = {"question": "Which?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "C"}
CHOICES = ARC["choices"]
DAMAGES = [
    ("MMLU", MMLU, {"choices": ["1", "2", None, "5"]}, "abstract_algebra/test: row 3: UndefinedError: 'choices' is"),
    ("WinoGrande", WINOGRANDE, {"sentence": "The dog barked."}, "validation: row 3: ValueError: substring not found"),
    ("ARC-Challenge", ARC, {"choices": CHOICES | {"text": ["x", "y", None]}}, "row 3: its choices are"),
]


@pytest.mark.parametrize(("name", "row", "damage", "message"), DAMAGES)
def test_every_row_that_is_scored_is_tried(
    load_rows: Callable[..., Loaded], name: str, row: Row, damage: Row, message: str
) -> None:
    """Also where a row with the same label went well, and where the damage lies within a list."""
    with pytest.raises(UserError, match=rf"{name} \(.*{message}") as caught:
        load_rows(name, [row, row, row | damage])
    assert "\n" not in str(caught.value) and "fix the files" in str(caught.value)
    load_rows(name, [row, row, row])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "facts/test.jsonl, line 2 cannot be read as JSON"),
        (b"\n \n", "facts/test.jsonl holds no rows"),
        (b'{"a": "\xff"}\n', "facts/test.jsonl cannot be read"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "facts" / "test.jsonl"
    file.parent.mkdir()
    file.write_bytes(text)
    with pytest.raises(UserError, match=message):
        read_splits({"test": str(file)})


def test_the_definition_of_a_benchmark_is_that_of_all_its_parts(own: Path) -> None:
    suite = load_suite(str(own / "own.yaml"))
    benchmark = dataclasses.replace(suite.benchmarks[0], definition="smoke/{part}/t.yaml", parts=["a", "b"])
    hashes = set()
    for line in ("task: t", "task: other"):
        for part, text in {"a": "task: t", "b": line}.items():
            (own / "smoke" / part).mkdir(exist_ok=True)
            (own / "smoke" / part / "t.yaml").write_text(text)
        hashes.add(hash_definition(suite, benchmark))
    assert len(hashes) == 2
