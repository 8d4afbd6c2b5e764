"""What mixed_precision=auto stands for: the device's, kept by a resumed run, and the same on all processes."""

import json

import forks
import pytest
import torch
from safetensors.torch import load_file
from trained import load_config, read_record, unfinish
from ways import ROOT, WAYS

from moh_llm import devices
from moh_llm.devices import COMPUTE_DTYPE
from moh_llm.errors import UserError
from moh_llm.training.loop import train
from moh_llm.training.preflight import decide_precision

SMALL = ["--max_steps", "2", "--evaluation.eval_steps", "0", "--evaluation.max_tokens", "128", "--report_to", "[]"]
SMALL += ["--checkpoint.save_steps", "1"]


@pytest.mark.parametrize(("fast", "chosen"), [(True, "bf16"), (False, "no")])
def test_auto_asks_the_device(configure, monkeypatch, fast: bool, chosen: str) -> None:
    monkeypatch.delenv(COMPUTE_DTYPE)
    monkeypatch.setattr(devices, "computes_bfloat16_fast", lambda device: fast)
    assert decide_precision(configure(mixed_precision="auto")).mixed_precision == chosen
    for explicit in ("no", "bf16"):
        assert decide_precision(configure(mixed_precision=explicit)).mixed_precision == explicit


def test_a_dtype_that_training_has_not_is_refused(configure, monkeypatch) -> None:
    monkeypatch.setenv(COMPUTE_DTYPE, "float16")
    with pytest.raises(UserError, match="MOH_LLM_COMPUTE_DTYPE=float16: training computes in bfloat16 or float32"):
        train(configure(mixed_precision="auto"))


def test_a_resumed_run_keeps_its_precision(recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(COMPUTE_DTYPE, "bfloat16")
    config = load_config(recipe, [*SMALL, "--mixed_precision", "auto"])
    record = train(config)
    assert (record.config["mixed_precision"], record.compute_dtype) == ("bf16", "bfloat16")
    weights = load_file(tmp_path / "run" / "checkpoints" / "step-000002" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any(tensor.bfloat16().float().ne(tensor).any() for tensor in weights.values())
    # On a machine where auto is float32.
    monkeypatch.setenv(COMPUTE_DTYPE, "float32")
    assert "nothing to do" in "".join(_lines(config))
    unfinish(tmp_path / "run", 1)
    assert any("cpu in bfloat16" in line for line in _lines(config))
    assert read_record(tmp_path / "run")["config"]["mixed_precision"] == "bf16"
    with pytest.raises(UserError, match="different: mixed_precision"):
        train(load_config(recipe, [*SMALL, "--mixed_precision", "no"]))
    assert any("cpu in float32" in line for line in _lines(config, overwrite=True))


def _lines(config, **options: bool) -> list[str]:
    said: list[str] = []
    train(config, say=said.append, **options)
    return said


PROGRAM = """
import os, sys
os.environ["MOH_LLM_COMPUTE_DTYPE"] = ("float32", "bfloat16")[int(os.environ["RANK"])]
from moh_llm.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_processes_whose_run_is_refused_end_with_one_line(recipe, run) -> None:
    """The first of them refuses the recipe, or the text, while the other waits for it."""
    for change, message in ((["--seed", "1"], "another recipe; different: seed"), ([], "is not what the run in")):
        if not change:
            record = json.loads((run / "run.json").read_text())
            record["data"] = dict(reversed(record["data"].items()))
            (run / "run.json").write_text(json.dumps(record))
        words = ["-m", "moh_llm.cli", "train", str(recipe), *change]
        done = forks.run(*words, folder=ROOT, environment=WAYS["ddp"], processes=2)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count(message) == 1 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_processes_that_decide_otherwise_are_refused(recipe) -> None:
    done = forks.run("-c", PROGRAM, str(recipe), *SMALL, folder=ROOT, environment=WAYS["ddp"], processes=2)
    assert done.returncode == 2
    message = "error: mixed_precision=auto stands for bf16 on some of the processes and for no on others"
    assert done.stderr.count(message) == 1 and "Traceback" not in done.stderr
