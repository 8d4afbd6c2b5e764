"""From suite to lm-eval tasks: data that is missing, damaged or whole."""

import dataclasses
import json
import shutil
from pathlib import Path

import forks
import pytest

from moh_llm.errors import UserError
from moh_llm.evaluation.suite import load_suite
from moh_llm.evaluation.tasks import check_data, load_tasks, write_task_files

pytest.importorskip("lm_eval")


@pytest.fixture
def own_smoke(tmp_path: Path) -> Path:
    """A copy of the smoke suite whose data may be damaged."""
    suites = Path(__file__).resolve().parents[2] / "moh_llm" / "evaluation" / "suites"
    shutil.copytree(suites / "smoke", tmp_path / "smoke")
    shutil.copy(suites / "smoke.yaml", tmp_path / "own.yaml")
    return tmp_path


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


def test_data_dir_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        check_data(load_suite("paper"), tmp_path / "nowhere")


def test_wrong_fields_are_named(own_smoke: Path, tmp_path: Path) -> None:
    file = own_smoke / "smoke" / "moh-llm__smoke" / "facts" / "test.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_text("".join(json.dumps({"text": row["sentence"]}) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"1 benchmark.*mend the files: Facts \(moh-llm/smoke: .*sentence"):
        load_tasks(load_suite(str(own_smoke / "own.yaml")), tmp_path / "tasks", None)


def test_broken_json_and_too_few_examples_are_named_together(own_smoke: Path, tmp_path: Path) -> None:
    data = own_smoke / "smoke" / "moh-llm__smoke"
    (data / "facts" / "test.jsonl").write_text('{"sentence": "The end is mis\n')
    stories = data / "stories" / "train.jsonl"
    stories.write_text(stories.read_text(encoding="utf-8").splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"Facts \(.*Stories \(moh_smoke_stories has 1 examples in train, 2 are shown"):
        load_tasks(load_suite(str(own_smoke / "own.yaml")), tmp_path / "tasks", None)


def test_task_file_that_lm_eval_lacks_is_named(own_smoke: Path, tmp_path: Path) -> None:
    suite = own_smoke / "own.yaml"
    suite.write_text(suite.read_text(encoding="utf-8").replace("definition: smoke/facts.yaml", "stock: no/such.yaml"))
    with pytest.raises(UserError, match=r"Facts: task file no/such.yaml is not in"):
        load_tasks(load_suite(str(suite)), tmp_path / "tasks", None)


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_metrics_and_filters_that_tasks_lack_are_named_together(own_smoke: Path, tmp_path: Path) -> None:
    suite = own_smoke / "own.yaml"
    change(suite, "metric: acc\n    task: moh_smoke_facts", "metric: acc_norm\n    task: moh_smoke_facts")
    change(suite, "metric: acc\n    task: moh_smoke_stories", "metric: f1\n    task: moh_smoke_stories")
    change(
        own_smoke / "smoke" / "stories.yaml",
        "  - metric: acc\n    aggregation: mean",
        "  - metric: acc\n  - metric: f1",
    )
    change(suite, "filter: first_word", "filter: strict-match")
    with pytest.raises(UserError) as caught:
        load_tasks(load_suite(str(suite)), tmp_path / "tasks", None)
    assert str(caught.value) == (
        "suite smoke asks for what its tasks do not have; mend the suite: "
        "Facts (metric 'acc_norm': moh_smoke_facts has acc), "
        "Stories (metric 'f1': moh_smoke_stories has acc), "
        "Answers (filter 'strict-match': moh_smoke_answers has first_word)"
    )


def test_metrics_that_functions_name_when_called_are_let_through(own_smoke: Path, tmp_path: Path) -> None:
    (own_smoke / "smoke" / "own.py").write_text("def passed(references, predictions):\n    return {'pass@1': 1.0}\n")
    change(own_smoke / "smoke" / "answers.yaml", "metric: exact_match", "metric: !function own.passed")
    change(own_smoke / "smoke" / "answers.yaml", "    ignore_case: true\n", "")
    change(own_smoke / "own.yaml", "metric: exact_match", "metric: pass@1")
    assert len(load_tasks(load_suite(str(own_smoke / "own.yaml")), tmp_path / "tasks", None)) == 3


def test_whatever_a_definition_raises_is_one_line(own_smoke: Path, tmp_path: Path) -> None:
    (own_smoke / "smoke" / "own.py").write_text("def text(row):\n    assert False, 'not\\nready'\n")
    change(own_smoke / "smoke" / "facts.yaml", '"{{sentence}}"', "!function own.text")
    with pytest.raises(UserError, match=r"Facts \(moh-llm/smoke: AssertionError: not ready\)$"):
        load_tasks(load_suite(str(own_smoke / "own.yaml")), tmp_path / "tasks", None)


def test_the_hash_of_definitions_follows_all_their_files(tmp_path: Path) -> None:
    from moh_llm.evaluation.definitions import hash_definitions

    (tmp_path / "tasks" / "code").mkdir(parents=True)
    (tmp_path / "common").mkdir()
    files = {
        "tasks/one.yaml": "include: ../common/base.yaml\ntask: one\ndoc_to_text: !function code.prompts.text\n",
        "common/base.yaml": "include: [more.yaml]\n",
        "common/more.yaml": "include: base.yaml\n",  # a circle, which lm-eval refuses, ends here, too
        "common/metrics.py": "",
        "tasks/helpers.py": "",
        "tasks/code/prompts.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    definition = tmp_path / "tasks" / "one.yaml"
    hashes = [hash_definitions([definition])]
    for name in files:
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        hashes.append(hash_definitions([definition]))
    assert len(set(hashes)) == 7
    (tmp_path / "tasks" / "two.yaml").write_text("task: two\n")
    assert hash_definitions([definition]) == hashes[-1]


def test_without_data_dir_the_hub_paths_stay(tmp_path: Path) -> None:
    import yaml

    write_task_files(load_suite("paper"), tmp_path, None)
    assert len(list(tmp_path.glob("*.yaml"))) == 188
    gsm8k = yaml.safe_load((tmp_path / "gsm8k.yaml").read_text(encoding="utf-8"))
    assert gsm8k["num_fewshot"] == 8
    assert "dataset_path" not in gsm8k


def test_the_hubs_commit_is_asked_for(tmp_path: Path) -> None:
    import yaml

    write_task_files(load_suite("scratch"), tmp_path, None)
    sciq = yaml.safe_load((tmp_path / "sciq.yaml").read_text(encoding="utf-8"))
    assert sciq["dataset_kwargs"] == {"revision": "2c94ad3e1aafab77146f384e23536f97a4849815"}


@pytest.mark.parametrize("name", ["paper", "scratch"])
def test_script_datasets_of_the_hub_are_refused_at_once(name: str) -> None:
    with pytest.raises(
        UserError, match=r"LogiQA(, CMMLU)? cannot be read from the Hub.*fetch-benchmarks DIR"
    ) as caught:
        check_data(load_suite(name), None)
    assert ("CMMLU" in str(caught.value)) == (name == "paper")


@pytest.fixture
def hub_suite(tmp_path: Path) -> str:
    """A suite of two benchmarks of the Hub."""
    path = tmp_path / "hub.yaml"
    path.write_text("name: h\ntitle: H\nbenchmarks: [{from: paper, name: SciQ}, {from: paper, name: PIQA}]\n")
    return str(path)


def test_refusals_of_the_hub_are_named_together(
    hub_suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def refuse(path: str, **_: object) -> None:
        raise RuntimeError(f"Dataset scripts are no longer supported, but found {path}.py")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"--data-dir .*: SciQ \(allenai/sciq: a script dataset.*PIQA \(baber/piqa"):
        load_tasks(load_suite(hub_suite), tmp_path / "tasks", None)


def test_unreachable_hub_is_asked_once(hub_suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def refuse(path: str, **_: object) -> None:
        asked.append(path)
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"reach the Hub; give the data as files with --data-dir"):
        load_tasks(load_suite(hub_suite), tmp_path / "tasks", None)
    assert asked == ["allenai/sciq"]


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
            prompt = task.instances[0].args[0]
            assert prompt.strip()
            if benchmark.shots:
                shown = task.fewshot_cfg.split or task.config.training_split
                assert shown == benchmark.fewshot_split


def test_text_scores_that_nothing_asks_for_are_not_imported(tmp_path: Path) -> None:
    """What TruthfulQA's tasks import for them comes late, and works when it is used."""
    pytest.importorskip("rouge_score")
    script = f"""
import pathlib, sys
from moh_llm.evaluation.suite import load_suite
from moh_llm.evaluation.tasks import load_tasks
for number in "12":  # as for the scores and for the analysis
    load_tasks(load_suite("smoke"), pathlib.Path({str(tmp_path)!r}) / number, None)
from rouge_score import rouge_scorer
assert "nltk" not in sys.modules
assert rouge_scorer.RougeScorer(["rouge1"]).score("a b c d", "a b c e")["rouge1"].recall == 0.75
assert "nltk" in sys.modules
"""
    done = forks.run("-c", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
