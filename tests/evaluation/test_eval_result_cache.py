"""A run that is killed keeps its finished benchmarks; the same command uses those whose key is the same."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from records import read

from moh_llm import __version__
from moh_llm.evaluation.result_cache import file_name

pytest.importorskip("lm_eval")

ROOT = Path(__file__).resolve().parents[2]
# The script dies without a word in the fifth benchmark: in the second one of the second model.
DIE = """
import os, runpy, signal, sys
from moh_llm.evaluation import runner
whole, calls = runner.run_benchmark, []
def run(*arguments):
    calls.append(arguments)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*arguments)
runner.run_benchmark = run
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the benchmarks that are scored from here on."""
    from moh_llm.evaluation import runner

    whole, seen = runner.run_benchmark, []

    def run(lm: Any, loaded: Any, *rest: Any) -> Any:
        seen.append(loaded.benchmark.name)
        return whole(lm, loaded, *rest)

    monkeypatch.setattr(runner, "run_benchmark", run)
    return seen


@pytest.mark.slow
def test_a_killed_run_goes_on(
    tiny_llama: Path,
    tiny_moh: Path,
    smoke_report: Path,
    tmp_path: Path,
    run_evaluate: Callable[..., int],
    without_times: Callable[[Any], Any],
    calls: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [tiny_moh, "--base", tiny_llama, "--suite", "smoke", "--batch-size", "3", "--device", "cpu"]
    words += ["--log-samples", "--output"]
    command = ["-c", DIE, str(ROOT / "evaluate.py"), *map(str, words), str(tmp_path / "killed")]
    died = forks.run(*command, folder=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    assert died.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    kept = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json"))
    assert kept == [
        f"killed.partial/{name}.json" for name in ("base/Answers", "base/Facts", "base/Stories", "model/Facts")
    ]

    assert run_evaluate(*words, tmp_path / "killed") == 0
    assert calls == ["Stories", "Answers"]
    said = capsys.readouterr().err
    assert said.count("(from an earlier run)") == 4 and "loading base" not in said
    assert not (tmp_path / "killed.partial").exists()

    whole = smoke_report / "report"
    assert without_times(read(tmp_path / "killed")) == without_times(read(whole))
    logs = [
        {file.relative_to(run): file.read_bytes() for file in (run / "samples").rglob("*.jsonl")}
        for run in (tmp_path / "killed", whole)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 6


@pytest.fixture
def one_kept(
    tiny_llama: Path, tmp_path: Path, run_evaluate: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """The words of a command whose first run left Facts and Stories behind, for a model in tmp_path/model."""
    from lm_eval.models.huggingface import HFLM

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not today")

    shutil.copytree(tiny_llama, tmp_path / "model")
    words = [tmp_path / "model", "--suite", "smoke", "--limit", "2", "--device", "cpu", "--output", tmp_path / "report"]
    with monkeypatch.context() as patch:
        patch.setattr(HFLM, "generate_until", fail)
        assert run_evaluate(*words) == 1
    return [*words, "--overwrite"]


@pytest.mark.slow
def test_only_what_fits_is_taken_up(
    one_kept: list[Any],
    tmp_path: Path,
    run_evaluate: Callable[..., int],
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path / "report.partial", saved)

    def again(*more: str) -> tuple[list[str], str]:
        """The benchmarks that another run scores, from what the first one left, and what it says."""
        shutil.rmtree(tmp_path / "report.partial", ignore_errors=True)
        shutil.copytree(saved, tmp_path / "report.partial")
        calls.clear()
        capsys.readouterr()
        assert run_evaluate(*one_kept, *more) == 0
        return calls[:], capsys.readouterr().err

    everything = ["Facts", "Stories", "Answers"]
    assert again("--batch-size", "3")[0] == ["Answers"]
    scored, said = again("--limit", "3")
    assert scored == everything and "model: Stories is scored anew: limit was 2, is 3" in said
    scored, said = again("--compute-dtype", "bfloat16")
    assert scored == everything and "model: Facts is scored anew: dtype was float32, is bfloat16" in said
    scored, said = again("--log-samples")
    assert scored == everything and "model: Facts is scored anew: its items were not logged" in said

    with monkeypatch.context() as patch:
        patch.setattr("moh_llm.evaluation.result_cache.__version__", "9")
        scored, said = again()
    assert scored == everything and f"scored anew: moh_llm was {__version__}, is 9" in said

    (saved / "model" / "Facts.json").write_text('{"key": ')
    scored, said = again("--share-prefixes")
    assert scored == everything and "model: Stories is scored anew: share_prefixes was False, is True" in said
    assert "Facts.json is damaged" in said
    # The same weights, but another tokenizer.
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"note": "changed"}))
    scored, said = again()
    assert scored == everything and "model: Stories is scored anew: the model's files differ" in said


def test_other_data_or_another_definition_is_scored_anew(tiny_llama: Path, tmp_path: Path, calls: list[str]) -> None:
    """Its path is the same; what lies there is not."""
    from moh_llm.evaluation.result_cache import ResultCache
    from moh_llm.evaluation.runner import score
    from moh_llm.evaluation.suite import SUITES, load_suite

    shutil.copytree(SUITES / "smoke", tmp_path / "smoke")
    shutil.copy(SUITES / "smoke.yaml", tmp_path / "own.yaml")
    cache, said = ResultCache(tmp_path / "kept"), []

    def scored() -> list[str]:
        calls.clear()
        score({"model": str(tiny_llama)}, load_suite(str(tmp_path / "own.yaml")), limit=1, cache=cache, say=said.append)
        return calls[:]

    assert scored() == ["Facts", "Stories", "Answers"] and scored() == []
    file = tmp_path / "smoke" / "moh-llm__smoke" / "stories" / "train.jsonl"
    file.write_text("".join(reversed(file.read_text(encoding="utf-8").splitlines(keepends=True))))
    assert scored() == ["Stories"]
    assert "model: Stories is scored anew: its data differ" in said
    definition = tmp_path / "smoke" / "stories.yaml"
    definition.write_text(definition.read_text(encoding="utf-8").replace("Story:", "Tale:"))
    assert scored() == ["Stories"]
    assert "model: Stories is scored anew: the files of its task differ" in said


def test_only_what_was_kept_is_removed(tmp_path: Path) -> None:
    from moh_llm.evaluation.result_cache import CachedResult, ResultCache
    from moh_llm.evaluation.scoring import Score

    cache = ResultCache(tmp_path / "report.partial")
    score = Score([[1.0]], {"facts": (1.0, 1)}, 1.0, False, 8)
    result = CachedResult(key={}, score=score, context=64, hardware="a card")
    for label in ("base", "model", "an earlier one"):
        cache.store(label, "Natural Questions", result, [{"doc_id": 0}])
    leftover = cache.samples_file("base", "Natural Questions")
    leftover.with_name(f".{leftover.name}.123.tmp").write_text("half")
    mine = [cache.folder / name for name in ("notes.txt", "model/config.json", "model/list.json", "other/data.json")]
    (cache.folder / "other").mkdir()
    for file, text in zip(mine, ["mine", '{"key": 1}', "[1", "{}"], strict=True):
        file.write_text(text)
    cache.remove()
    assert sorted(path for path in cache.folder.rglob("*") if path.is_file()) == sorted(mine)
    assert sorted(path.name for path in cache.folder.iterdir()) == ["model", "notes.txt", "other"]
    for file in mine:
        file.unlink()
    (cache.folder / "other").rmdir()
    cache.store("model", "Facts", result, None)
    cache.remove()
    assert list(tmp_path.iterdir()) == []


def test_names_stay_below_their_folder_and_apart() -> None:
    unsafe = {"..": "_", ".hidden": "_hidden", "a/../b": "a_.._b", "Natural Q": "Natural_Q"}
    assert {name: file_name(name)[:-9] for name in unsafe} == unsafe
    names = ["a b", "a_b", "a/b", "a  b", ".b", "_b", "..b"]
    assert len({file_name(name) for name in names}) == len(names)
    assert [file_name(name) for name in ("a_b", "v1.5", "MMLU-5")] == ["a_b", "v1.5", "MMLU-5"]
