"""The command that runs the others on a GPU: what it starts, ends, records and resumes, and all of it at tiny sizes."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_evidence
from gpu_evidence import Job, left, open_record, run_jobs

CORPORA = ("redpajama_arxiv", "redpajama_wikipedia", "redpajama_book", "dolma", "pile")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(path: Path, todo: dict[str, Job], resume: bool = True) -> dict:
    record = open_record(path, resume)
    run_jobs("part", left(todo, record), path, record, time.monotonic() + 600, at_once=2)
    return json.loads(path.read_text())


def test_commands_are_recorded_and_those_that_failed_run_again(tmp_path, capsys):
    path, file, made = tmp_path / "out" / "record.json", tmp_path / "figures.json", tmp_path / "made"
    write = f"import pathlib; pathlib.Path({str(file)!r}).write_text('{{\"kl\": 0.5}}'); print('done')"
    make = f"import pathlib; made = pathlib.Path({str(made)!r}); made.mkdir(); assert {{}}"
    todo = {"a/good": Job(python(write), file, file), "a/bad": Job(python(make.format("False, 'it broke'")), made)}
    record = run(path, todo, resume=False)
    good, bad = (record["commands"][name] for name in todo)
    assert (good["status"], good["printed"], good["figures"]) == (0, ["done"], {"kl": 0.5})
    assert bad["status"] == 1 and bad["printed"][-1] == "AssertionError: it broke" and "figures" not in bad
    assert "a/bad: " in (printed := capsys.readouterr().out) and "status 1: AssertionError: it broke" in printed
    assert [*left(todo, record)] == ["a/bad"] and made.is_dir()
    # The folder that it left is not in its way; what ended well does not run again, until its command changes.
    todo["a/bad"] = Job(python(make.format("True")), made)
    again = run(path, todo)
    assert again["commands"]["a/good"] == good and not left(todo, again)
    assert again["seconds"]["part"] > record["seconds"]["part"]
    assert [*left(todo | {"a/good": Job(python(write + " "), file)}, again)] == ["a/good"]
    file.unlink()
    assert [*left(todo, again)] == ["a/good"]
    with pytest.raises(SystemExit, match="not empty"):
        open_record(path, resume=False)


def test_at_the_limit_a_command_ends_with_its_processes_and_the_rest_stays_in_the_record(tmp_path, monkeypatch):
    path, child = tmp_path / "out" / "record.json", tmp_path / "child"
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = f"import os, pathlib, subprocess, time; one = subprocess.Popen({sleep}); "
    start += f"pathlib.Path('new').write_text(str(one.pid)); os.replace('new', {str(child)!r}); time.sleep(60)"

    class Clock:
        """The limit is reached when one command has ended, and the child of another runs."""

        sleep = time.sleep

        @staticmethod
        def monotonic() -> float:
            ended = path.exists() and json.loads(path.read_text())["commands"]
            return 100 if ended and child.exists() else 0

    monkeypatch.setattr(gpu_evidence, "time", Clock)
    todo = {"fast": Job(python("print(1)")), "slow": Job(python(start)), "next": Job(sleep)}
    run_jobs("part", todo, path, record := open_record(path, resume=False), 60, at_once=2)
    assert json.loads(path.read_text()) == record
    found = {name: one["status"] for name, one in record["commands"].items()}
    # The third may or may not have begun by then.
    assert {"next": -9, **found} == {"fast": 0, "slow": -9, "next": -9}
    assert [*left(todo, record)] == ["slow", "next"]
    number = int(child.read_text())
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def corpora(folder: Path) -> Path:
    """Texts with a folder for each source; documents of 6,000 bytes."""
    for name in CORPORA:
        file = folder / name / "train-00000-of-00001.jsonl"
        file.parent.mkdir(parents=True)
        text = f"The river by the {name} was high that spring, and the boats lay tied to the poplars. " * 75
        file.write_text("".join(json.dumps({"text": f"{number}. {text[:6000]}"}) + "\n" for number in range(60)))
    return folder


def test_the_plan_names_every_part_and_flags_that_there_are_and_runs_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "base").mkdir()
    words = ["gpu_evidence.py", f"{tmp_path}/base", "--corpora", str(corpora(tmp_path / "text")), "--plan"]
    words += ["--output-dir", str(tmp_path / "out"), "--longer", str(tmp_path / "base")]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu_evidence.main() == 0 and not (tmp_path / "out").exists()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [*gpu_evidence.PARTS]
    assert (
        lines[-1] == f"by estimate {sum(estimate for _, estimate, _ in gpu_evidence.PARTS.values())} s; 570 s are given"
    )
    monkeypatch.setattr(sys, "argv", [*words, "--parts", "train", "ruler"])
    assert gpu_evidence.main() == 0 and [line[:5] for line in capsys.readouterr().out.splitlines()[:-1]] == [
        "train",
        "ruler",
    ]
    scripts = Path(gpu_evidence.__file__).parent
    args = argparse.Namespace(base=tmp_path, longer=tmp_path, corpora=tmp_path / "text", output_dir=tmp_path / "out")
    parts = gpu_evidence.make_parts(args, gpu_evidence.TINY)
    for job in (job for part in parts.values() for job in part.values() if Path(job.words[1]).parent == scripts):
        declared = Path(job.words[1]).read_text() + (scripts / "command.py").read_text()
        assert [word for word in job.words if word.startswith("--") and f'"{word}"' not in declared] == [], job.words[1]
    (tmp_path / "text" / "pile" / "train-00000-of-00001.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"has no pile/train-00000\*"):
        gpu_evidence.main()


@pytest.mark.slow
def test_commands_run_at_their_tiny_size_and_none_twice(make_llama, tmp_path):
    # All parts take ten minutes, and their commands differ in their flags: the test above reads those.
    parts = ["plans", "train", "score"]
    base = make_llama(max_position_embeddings=4096, num_attention_heads=8, num_key_value_heads=4)
    words = [sys.executable, gpu_evidence.__file__, str(base), "--corpora", str(corpora(tmp_path / "text")), "--tiny"]
    words += ["--output-dir", str(tmp_path / "out"), "--minutes", "60", "--parts", *parts]
    first = subprocess.run(words, capture_output=True, text=True)
    assert (first.returncode, first.stderr) == (0, ""), first.stdout
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert {name.split("/")[0] for name in record["commands"]} == {*record["seconds"]} == {*parts}
    kl = record["commands"]["score/0.33-2-0"]["figures"]
    assert len(kl["documents"]) == 2 == len(kl["prompts"]) and len(kl["documents"]["0"]) == 3
    second = subprocess.run([*words, "--resume"], capture_output=True, text=True)
    assert second.returncode == 0 and second.stdout.splitlines()[-1] == "left: nothing"
    assert json.loads((tmp_path / "out" / "record.json").read_text()) == record
