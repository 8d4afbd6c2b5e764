"""Whole runs at toy size, one of them killed and resumed."""

import shutil
import signal
import time
from pathlib import Path

import forks
import pytest
import torch
import yaml
from safetensors.torch import load_file
from trained import read_log, read_record, unfinish

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training.loop import train

ROOT = Path(__file__).parents[2]


def test_distillation_brings_the_model_nearer_to_its_base(configure) -> None:
    keys = {"optimizer.learning_rate": 3e-3, "evaluation.eval_steps": 140, "checkpoint.save_steps": 140}
    config = configure(max_steps=140, **keys)
    record = train(config)
    first, *log = read_log(Path(config.output_dir))
    assert len(log) == 140
    start, end = (sum(line["kl"] for line in part) / 4 for part in (log[:4], log[-4:]))
    assert end < 0.6 * start
    assert record.status == "finished" and sum(entry["tokens"] for entry in record.data_read.values()) == 140 * 4 * 32
    assert record.evaluation.kl < 0.6 * first["validation"]["kl"]  # held-out text
    assert record.evaluation.reference_perplexity > 1


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_killed_run_resumes_bit_for_bit(configure, method: str) -> None:
    overrides: dict[str, object] = {"max_steps": 35, "checkpoint.save_steps": 7, "evaluation.eval_steps": 20}
    if method == "lora":
        overrides |= {"lora.rank": 4}
    unbroken = configure(**overrides)
    train(unbroken)

    output = Path(unbroken.output_dir).parent / "killed"
    command = ["train.py", str(output.parent / "recipe.yaml"), "--output-dir", str(output)]
    command += [f"--{name}={value}" for name, value in overrides.items()]
    process = forks.Program(command, ROOT, ENVIRONMENT)
    deadline = time.monotonic() + 60
    # A few steps past a checkpoint, so that there is something to do again.
    while not ((output / "log.jsonl").exists() and len((output / "log.jsonl").read_text().splitlines()) > 18):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert read_record(output)["status"] == "running"

    done = forks.run(*command, folder=ROOT, environment=ENVIRONMENT)
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
    assert read_log(output) == read_log(Path(unbroken.output_dir))
    for name in ("model/model.safetensors", "checkpoints/step-000035/model.safetensors"):
        mine, other = load_file(output / name), load_file(Path(unbroken.output_dir) / name)
        assert mine.keys() == other.keys()
        assert all(torch.equal(tensor, other[key]) for key, tensor in mine.items())


def test_a_corrupt_checkpoint_is_passed_over(configure, finished_run, run) -> None:
    unfinish(run, 6)
    (run / "checkpoints" / "step-000006" / "optimizer.safetensors").write_bytes(b"")
    (run / "log.jsonl").open("a").write('{"step": 7, "lo')  # a line that a kill cut short
    said: list[str] = []
    train(configure(), say=said.append)
    said = [line for line in said if "tokens are in" not in line and not line.startswith("teacher: ")]
    assert "skipped checkpoint" in said[0] and "optimizer.safetensors was changed (0 bytes" in said[0]
    assert "resumed from" in said[1] and "step-000004" in said[1]
    assert read_log(run) == read_log(finished_run)
    weights, again = (load_file(folder / "model" / "model.safetensors") for folder in (finished_run, run))
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


def test_a_run_is_refused_what_it_did_not_begin_with(configure, run, mixture_file: Path, model_folder, tmp_path: Path):
    text = Path(shutil.copytree(mixture_file.parent, tmp_path / "text"))  # to be changed
    elsewhere = {"data.mixture": str(text / "mixture.yaml")}
    assert train(configure(**elsewhere)).status == "finished"  # the same text at another place
    with pytest.raises(UserError, match=r"different: evaluation\.eval_steps, gradient_checkpointing\."):
        train(configure(gradient_checkpointing=True, **{"evaluation.eval_steps": 2}))
    spec = yaml.safe_load((text / "mixture.yaml").read_text())
    spec["sources"] = dict(reversed(spec["sources"].items()))
    (text / "mixture.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    with pytest.raises(UserError, match=r"^the order of the sources in data\.mixture=.* is not what the run in"):
        train(configure(**elsewhere))
    with next(text.glob("one*")).open("a") as file:
        file.write('{"text": "One more document."}\n')
    with pytest.raises(UserError, match=r"is not what the run in .* began with"):
        train(configure(**elsewhere))
    unfinish(run, 4)
    other = tmp_path / "other"
    shutil.copytree(model_folder, other, ignore=shutil.ignore_patterns("model*safetensors*"))
    model = MoHLlamaForCausalLM.from_pretrained(model_folder)
    model.lm_head.weight.data[0] += 1
    model.save_pretrained(other)
    with pytest.raises(UserError, match=r"different: model \(other config, tokenizer or weights\)"):
        train(configure(model=str(other)))
    with pytest.raises(UserError, match=r"different: schedule\.warmup_steps\."):
        train(configure(**{"schedule.warmup_steps": 5}))


def test_bad_input_ends_in_one_line_and_status_2(recipe: Path, model_folder: Path, tmp_path: Path, capsys) -> None:
    cut, taken = (tmp_path / name for name in ("cut", "taken"))
    shutil.copytree(model_folder, cut)
    weights = min(cut.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    taken.mkdir()
    (taken / "mine.txt").write_text("keep")
    cases = [
        (["--model", "nowhere"], "model=nowhere is not a folder"),
        (["--model", str(cut)], "is damaged or truncated"),
        (["--output-dir", str(taken)], "is not empty and holds no run.json"),
        (["--output-dir", str(recipe)], "is a file"),
        (["--data.mixture", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--lora.target_modules", "[query]"], "no 'query'"),
    ]
    for arguments, message in cases:
        assert main(["train", str(recipe), *arguments]) == 2, arguments
        stderr = capsys.readouterr().err
        line = stderr.splitlines()[-1]
        assert line.startswith("error: ") and message in line, stderr
    assert not (tmp_path / "run").exists()
    assert [path.name for path in taken.iterdir()] == ["mine.txt"]


def test_overwriting_a_run_keeps_the_model_that_is_read(run, recipe, capsys):
    model = run / "model"
    assert main(["train", str(recipe), "--model", str(model), "--max_steps", "1", "--overwrite"]) == 2
    assert f"would replace {model}, which is an input" in capsys.readouterr().err
    assert (model / "model.safetensors").exists()


def test_overwriting_removes_a_run_alone_and_only_once_nothing_is_missing(run, recipe, tmp_path, capsys):
    again = ["train", str(recipe), "--max_steps", "1", "--report_to", "[]", "--overwrite"]
    (run / "report").mkdir()
    (run / "report" / "report.json").write_text("{}")  # where the end of a run tells users to put scores
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for wrong in (["--data.mixture", "nowhere.yaml"], ["--lora.target_modules", "[query]"], ["--base", "nowhere"]):
        assert main([*again, *wrong]) == 2
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert main(again) == 0
    assert read_record(run)["config"]["max_steps"] == 1 and len(list((run / "checkpoints").iterdir())) == 1
    assert (run / "report" / "report.json").read_text() == "{}"
    other = tmp_path / "other"
    shutil.copytree(run / "model", other / "model")
    assert main([*again, "--output-dir", str(other)]) == 2
    assert "holds no run.json, so no run; name another folder" in capsys.readouterr().err
    assert (other / "model" / "config.json").exists()


@pytest.mark.slow
def test_a_signal_saves_and_leaves(configure) -> None:
    overrides = {"max_steps": 70, "checkpoint.save_steps": 70, "evaluation.eval_steps": 0}
    unbroken = configure(**overrides)
    train(unbroken)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        output = Path(unbroken.output_dir).parent / number.name
        command = ["train.py", str(output.parent / "recipe.yaml"), "--output-dir", str(output)]
        command += [f"--{key}={value}" for key, value in overrides.items()]
        process = forks.Program(command, ROOT, ENVIRONMENT)
        while not (output / "log.jsonl").exists() or len((output / "log.jsonl").read_text().splitlines()) < 5:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        status, said = process.wait(), process.stdout
        assert status == 0 and "stopped by a signal after step" in said
        saved = int(said.split("after step ")[1].split(",")[0])
        assert (output / "checkpoints" / f"step-{saved:06d}").is_dir() and not (output / "model").exists()
        assert read_record(output)["status"] == "running"
        train(configure(output_dir=str(output), **overrides))
        assert read_log(output) == read_log(Path(unbroken.output_dir))
