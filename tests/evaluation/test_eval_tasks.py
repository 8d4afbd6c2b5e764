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
from moh_llm.evaluation.suite import SUITES, data_file, load_suite
from moh_llm.evaluation.tasks import Loaded, check_data, load_tasks, read_splits, write_task_files

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


def test_missing_data_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "allenai__sciq" / "default").mkdir(parents=True)
    (tmp_path / "allenai__sciq" / "default" / "test.jsonl").write_text("{}\n")
    with pytest.raises(UserError) as caught:
        check_data(load_suite("paper"), tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert "MMLU (cais__mmlu/abstract_algebra/test.jsonl and 113 more)" in message
    assert "Natural Questions (google-research-datasets__nq_open/default/validation.jsonl and 1 more)" in message
    assert "SciQ" not in message  # the one split that 0-shot needs is there
    with pytest.raises(UserError, match="is not a folder"):
        check_data(load_suite("paper"), tmp_path / "nowhere")


def test_broken_json_and_too_few_examples_are_named_together(own: Path, load: Load) -> None:
    (own / "data" / "facts" / "test.jsonl").write_text('{"sentence": "The end is mis\n')
    stories = own / "data" / "stories" / "train.jsonl"
    stories.write_text(stories.read_text(encoding="utf-8").splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"Facts \(.*Stories \(moh_smoke_stories has 1 examples in train, 2 are shown"):
        load()


def test_task_file_that_lm_eval_lacks_is_named(own: Path, load: Load) -> None:
    change(own / "own.yaml", "definition: smoke/facts.yaml", "stock: no/such.yaml")
    with pytest.raises(UserError, match=r"Facts: task file no/such.yaml is not in"):
        load()


def test_metrics_and_filters_that_tasks_lack_are_named_together(own: Path, load: Load) -> None:
    change(own / "own.yaml", "metric: acc\n    task: moh_smoke_facts", "metric: acc_norm\n    task: moh_smoke_facts")
    change(own / "own.yaml", "filter: first_word", "filter: strict-match")
    with pytest.raises(UserError) as caught:
        load()
    assert str(caught.value) == (
        "suite smoke asks for what its tasks do not have; fix the suite: "
        "Facts (metric 'acc_norm': moh_smoke_facts has acc), "
        "Answers (filter 'strict-match': moh_smoke_answers has first_word)"
    )


def test_metrics_that_functions_name_when_called_are_let_through(own: Path, load: Load) -> None:
    (own / "smoke" / "own.py").write_text("def passed(references, predictions):\n    return {'pass@1': 1.0}\n")
    change(own / "smoke" / "answers.yaml", "metric: exact_match", "metric: !function own.passed")
    change(own / "smoke" / "answers.yaml", "    ignore_case: true\n", "")
    change(own / "own.yaml", "metric: exact_match", "metric: pass@1")
    assert len(load()) == 3


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


@pytest.mark.parametrize("name", ["paper", "scratch"])
def test_script_datasets_of_the_hub_are_refused_at_once(name: str) -> None:
    names = "LogiQA" if name == "scratch" else "CMMLU, LogiQA"
    with pytest.raises(UserError, match=rf"^{names} cannot be read from the Hub.*fetch-benchmarks DIR"):
        check_data(load_suite(name), None)


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
    ("facts/test", 3, {"answer": 4}, "row 3: the answer 4 is none of the 4 choices"),
    ("facts/test", 3, {"answer": "b"}, "facts/test.jsonl: values of one field have different types: ArrowInvalid: "),
    ("facts/test", 2, {"sentence": "1984"}, "row 2: its question is 1984, which lm-eval does not take for text"),
    ("stories/train", 2, {"story": None}, r"Stories \(stories/train: row 2: UndefinedError: 'story' is undefined\)"),
    ("stories/train", 2, {"endings": ["Only one."]}, "stories/train: row 2: the answer 1 is none of the 1 choices"),
    ("answers/test", 6, {"question": None}, r"Answers \(answers/test: row 6: UndefinedError: 'question'"),
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
    if "test" in file and "types" not in message:
        load(limit=number - 1)
    from lm_eval.utils import env

    assert "from_string" not in vars(env)  # lm-eval is left as it was


@pytest.fixture
def load_stock(tmp_path: Path) -> Callable[..., None]:
    """Load a benchmark of the paper, without examples and of several subjects one, with the given rows."""

    def load(name: str, rows: list[Row], limit: int | None = None) -> None:
        suite = load_suite("paper")
        benchmark = next(benchmark for benchmark in suite.benchmarks if benchmark.name == name)
        parts = benchmark.parts if benchmark.average == "parts" else benchmark.parts[:1]
        benchmark = dataclasses.replace(benchmark, shots=0, fewshot_split=None, parts=parts)
        for part in benchmark.expand():
            file = data_file(tmp_path / "data", benchmark, part, benchmark.eval_split)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        suite = dataclasses.replace(suite, benchmarks=[benchmark])
        load_tasks(suite, tmp_path / "tasks", tmp_path / "data", limit)

    return load


MMLU = {"question": "Which is even?", "choices": ["1", "2", "3", "5"], "answer": 1}
WINOGRANDE = {"sentence": "The _ barked.", "option1": "dog", "option2": "cat", "answer": "1"}
HELLASWAG = {"ctx_a": "A man sits.", "ctx_b": "he", "activity_label": "Sitting", "endings": ["a", "b"], "label": "1"}
ARC: Row = {"question": "Which?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "C"}
CHOICES = ARC["choices"]
TARGETS = {"choices": ["yes", "no"], "labels": [1, 0]}
TRUTHFULQA = {"question": "Is it?", "mc1_targets": TARGETS, "mc2_targets": TARGETS}
DAMAGES = [
    ("HellaSwag", HELLASWAG, {"ctx_b": None}, "AttributeError: .*"),
    ("MMLU", MMLU, {"choices": ["1", "2", None, "5"]}, "abstract_algebra/test: row 3: UndefinedError: 'choices' is"),
    ("WinoGrande", WINOGRANDE, {"sentence": "The dog barked."}, "validation: row 3: ValueError: substring not found"),
    ("ARC-Challenge", ARC, {"choices": CHOICES | {"text": ["x", "y", None]}}, "row 3: its choices are"),
    ("TruthfulQA", TRUTHFULQA, {"mc1_targets": {"choices": [], "labels": []}}, r"row 3: its choices are \[\], not"),
    ("TruthfulQA", TRUTHFULQA, {"mc2_targets": TARGETS | {"labels": [1]}}, "validation: row 3: IndexError: "),
]


@pytest.mark.parametrize(("name", "row", "damage", "message"), DAMAGES)
def test_every_row_that_is_scored_is_tried(
    load_stock: Callable[..., None], name: str, row: Row, damage: Row, message: str
) -> None:
    """Also where a row with the same label went well, and where the damage lies within a list."""
    with pytest.raises(UserError, match=rf"{name} \(.*{message}") as caught:
        load_stock(name, [row, row, row | damage])
    assert "\n" not in str(caught.value) and "fix the files" in str(caught.value)
    load_stock(name, [row, row, row])


def test_fewer_choices_than_others_have_may_be_scored(load_stock: Callable[..., None]) -> None:
    four = {"text": ["w", "x", "y", "z"], "label": ["1", "2", "3", "4"]}
    load_stock("ARC-Challenge", [ARC | {"choices": four, "answerKey": "4"}, ARC])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "facts/test.jsonl, line 2 cannot be read as JSON"),
        (b'{"a": 1}\n\n[1]\n', "facts/test.jsonl, line 3: not an object"),
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


def test_rows_are_those_of_the_library(shared_benchmarks: Path, tmp_path: Path) -> None:
    """Every kind of field: numbers, lists of strings, lists within records."""
    import datasets

    for file in ("cais__mmlu/anatomy/test", "truthfulqa__truthful_qa/multiple_choice/validation"):
        path = str(shared_benchmarks / f"{file}.jsonl")
        theirs = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path))
        assert read_splits({"x": path})["x"].to_list() == theirs.to_list()
