"""What mixed_precision=auto stands for: the device's, kept by a resumed run, and the same on all processes."""

from pathlib import Path

import forks
import pytest
import torch
from trained import read_record, unfinish
from ways import WAYS

from moh_llm import devices
from moh_llm.devices import COMPUTE_DTYPE, name_device
from moh_llm.errors import UserError
from moh_llm.training import precision
from moh_llm.training.loop import train
from moh_llm.training.networks import reference_dtype
from moh_llm.training.precision import decide_precision
from moh_llm.training.recipe import load_config

ROOT = Path(__file__).parents[2]
SMALL = ["--max_steps", "2", "--evaluation.eval_steps", "0", "--evaluation.max_tokens", "128", "--report_to", "[]"]
SMALL += ["--checkpoint.save_steps", "1"]


@pytest.mark.parametrize(("fast", "chosen"), [(True, "bf16"), (False, "no")])
def test_auto_asks_the_device(configure, monkeypatch, fast: bool, chosen: str) -> None:
    monkeypatch.delenv(COMPUTE_DTYPE)
    monkeypatch.setattr(devices, "computes_bfloat16_fast", lambda device: fast)
    assert decide_precision(configure(mixed_precision="auto")).mixed_precision == chosen
    for explicit in ("no", "bf16"):
        assert decide_precision(configure(mixed_precision=explicit)).mixed_precision == explicit
    assert decide_precision(configure(mixed_precision="auto"), dtype=torch.bfloat16).mixed_precision == "bf16"


def test_a_dtype_that_training_has_not_is_refused(configure, monkeypatch) -> None:
    monkeypatch.setenv(COMPUTE_DTYPE, "float16")
    with pytest.raises(UserError, match="MOH_LLM_COMPUTE_DTYPE=float16: training computes in bfloat16 or float32"):
        train(configure(mixed_precision="auto"))


def test_what_is_not_decided_is_no_float32(configure) -> None:
    with pytest.raises(AssertionError, match="not decided"):
        reference_dtype(configure(mixed_precision="auto"))


def test_a_resumed_run_keeps_its_precision(recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(precision, "computes_bfloat16_fast", lambda device: device.type != "cpu")
    said: list[str] = []
    monkeypatch.setenv(COMPUTE_DTYPE, "bfloat16")
    config = load_config(recipe, [*SMALL, "--mixed_precision", "auto"])
    record = train(config, say=said.append)
    cpu = torch.device("cpu")
    assert (record.config["mixed_precision"], record.compute_dtype) == ("bf16", "bfloat16")
    assert (record.device, record.device_name) == ("cpu", name_device(cpu))
    assert any(" weights are trained on 1 x cpu in bfloat16; 2 steps" in line for line in said)
    slow = "computes bfloat16 slower than float32; a new run with mixed_precision=no is faster"
    assert said.count(f"warning: {name_device(cpu)} {slow}") == 1
    # On a machine where auto is float32.
    monkeypatch.setenv(COMPUTE_DTYPE, "float32")
    assert "nothing to do" in "".join(_lines(config))
    unfinish(tmp_path / "run", 1)
    assert any("cpu in bfloat16" in line for line in _lines(config))
    assert read_record(tmp_path / "run")["config"]["mixed_precision"] == "bf16"
    with pytest.raises(UserError, match="different: mixed_precision"):
        train(load_config(recipe, [*SMALL, "--mixed_precision", "no"]))
    assert any("cpu in float32" in line for line in _lines(config, overwrite=True))
    assert read_record(tmp_path / "run")["config"]["mixed_precision"] == "no"


def _lines(config, **options: bool) -> list[str]:
    said: list[str] = []
    train(config, say=said.append, **options)
    return said


def test_a_damaged_record_is_reported_where_the_run_is_opened(configure, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"status": ')
    with pytest.raises(UserError, match=r"run\.json"):
        train(configure(mixed_precision="auto"))


PROGRAM = """
import os, sys
os.environ["MOH_LLM_COMPUTE_DTYPE"] = ("float32", "bfloat16")[int(os.environ["RANK"])]
from moh_llm.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_processes_that_decide_otherwise_are_refused(recipe) -> None:
    done = forks.run("-c", PROGRAM, str(recipe), *SMALL, folder=ROOT, environment=WAYS["ddp"], processes=2)
    assert done.returncode == 2
    message = "error: mixed_precision=auto stands for bf16 on some of the processes and for no on others"
    assert done.stderr.count(message) == 1 and "Traceback" not in done.stderr
