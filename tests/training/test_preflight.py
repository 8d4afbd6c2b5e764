"""What the doctor says of jobs that are fit, and each fault of devices, batch, disk and memory."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from moh_llm.cli import main
from moh_llm.flops import training_flops
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training import preflight
from moh_llm.training.memory import Sizes, estimate_memory
from moh_llm.training.preflight import Device, diagnose
from moh_llm.training.recipe import load_config

RECIPES = sorted(
    path
    for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml")
    if not path.stem.startswith(("convert_", "evaluate_"))
)


def of_check(diagnosis, check: str) -> list[tuple[str, str]]:
    return [(finding.state, finding.text) for finding in diagnosis.findings if finding.check == check]


def the_fault(diagnosis) -> tuple[str, str]:
    """Check and text of the only fault."""
    ((check, text),) = [(finding.check, finding.text) for finding in diagnosis.findings if finding.state == "fault"]
    assert not diagnosis.fit and "\n" not in text
    return check, text


def test_attention_that_cannot_be_computed_is_a_fault(configure, monkeypatch):
    assert [state for state, _ in of_check(diagnose(configure()), "attention")] == ["ok"]

    def fail(*given: object) -> None:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(preflight, "choose_for", fail)
    ((state, text),) = of_check(diagnose(configure()), "attention")
    assert state == "fault" and "no kernel image is available" in text


# ---- a job that is fit


def test_a_fit_job_is_described_in_full(recipe, tmp_path, capsys, monkeypatch):
    record_file, usage = tmp_path / "doctor.json", shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)  # others write to the disk meanwhile
    # Flags may stand before the recipe and among its keys.
    keys = ["--max_steps", "4", "--mixed_precision", "bf16", "--optimizer.router_learning_rate", "1e-3"]
    flags = ["--gpu", "H100", *keys[:2], "--processes=2", *keys[2:]]
    assert main(["doctor", "--strategy", "fsdp2", str(recipe), *flags, "--json", str(record_file)]) == 0
    record, text = json.loads(record_file.read_text()), capsys.readouterr().out
    config = load_config(recipe, keys)
    diagnosis = diagnose(config, "fsdp2", 2, "H100")
    given = {"recipe": str(recipe), "strategy": "fsdp2", "processes": 2, "gpu": "H100"}
    assert record == given | diagnosis.record() and record["fit"] is True
    assert {finding["state"] for finding in record["findings"]} == {"ok"}
    names = "devices batch output model rates teacher tokenizer data disk memory"
    assert [*dict.fromkeys(finding["check"] for finding in record["findings"])] == names.split()
    model = MoHLlamaConfig.from_pretrained(config.model)
    memory = estimate_memory(config, model, Sizes.count(config, model), "fsdp2", 2)
    assert record["memory_per_process"] == vars(memory) | {"total": memory.total}
    plan = record["plan"]
    assert (plan["steps"], plan["tokens"]) == (4, 4 * 4 * 32)
    assert plan["flops"] == 16 * training_flops(model, 32, teacher=True, recompute=False, frozen=False)
    assert plan["days"] == pytest.approx(plan["flops"] / (2 * 0.4 * 989e12) / 86400)
    assert "40%" in plan["assumes"]
    assert all(finding["text"] in text for finding in record["findings"])


def test_only_a_known_peak_gives_days(configure):
    assert diagnose(configure(), gpu="L4").plan.days is None  # float32
    for precision_asked in ("bf16", "auto"):
        assert diagnose(configure(mixed_precision=precision_asked), gpu="L4").plan.days > 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_estimated_at_toy_size(path, model_folder, tmp_path):
    keys = {"model": model_folder, "output_dir": tmp_path / "run", "data.mixture": tmp_path / "none"}
    config = load_config(path, [f"--{name}={value}" for name, value in keys.items()])
    for strategy in ("one", "zero3"):
        diagnosis = diagnose(config, strategy, 1 if strategy == "one" else 2, "H100")
        assert the_fault(diagnosis)[0] == "data"
        assert diagnosis.memory.total > 0 and diagnosis.plan.flops > 0 and diagnosis.plan.days > 0
        assert diagnosis.plan.tokens == config.max_steps * config.tokens_per_step


# ---- faults


def test_a_model_that_is_not_there_leaves_nothing_to_estimate(configure, tmp_path):
    diagnosis = diagnose(configure(model=str(tmp_path / "none")))
    check, text = the_fault(diagnosis)
    assert check == "model" and "is not a folder" in text
    assert diagnosis.record()["memory_per_process"] is None and diagnosis.record()["plan"] is None


def test_too_little_disk_is_a_fault(configure, model_folder, tmp_path, monkeypatch):
    config = configure(
        output_dir=str(tmp_path / "a" / "b"), **{"checkpoint.milestone_every": 4, "checkpoint.save_total_limit": 1}
    )
    weights = sum(weight.numel() for weight in MoHLlamaForCausalLM.from_pretrained(model_folder).parameters())
    # Of steps 2, 4 and 6 the milestone 4, the newest, and the one that is written; and the float32 model.
    needed, asked = 3 * 12 * weights + 4 * weights, []
    usage = namedtuple("usage", "total used free")

    def leave(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(10**15, 0, free))

    leave(needed)
    assert diagnose(config).fit and asked == [tmp_path]
    leave(needed - 1)
    check, text = the_fault(diagnose(config))
    assert check == "disk" and "3 checkpoints" in text and "free some" in text
    # What the run has written already is paid for.
    old = tmp_path / "a" / "b" / "checkpoints" / "step-000002"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_bytes(b"x")
    diagnosis = diagnose(config)
    assert [state for state, _ in of_check(diagnosis, "disk")] == ["ok"]


def test_memory_that_is_too_small_is_a_fault(configure, monkeypatch):
    total = diagnose(configure()).memory.total
    for share, state in ((1.01, "fault"), (0.95, "warning"), (0.5, "ok")):
        device = Device("toy", round(total / share), None)
        monkeypatch.setattr("moh_llm.training.preflight.find_device", lambda gpu, processes, device=device: device)
        assert [found for found, _ in of_check(diagnose(configure()), "memory")] == [state]


# ---- the command


def test_a_fault_is_status_1_and_bad_usage_status_2(recipe, capsys):
    assert main(["doctor", str(recipe), "--processes", "3", "--strategy", "ddp"]) == 1
    assert "fault    batch      data.batch_size=4 must be a multiple" in capsys.readouterr().out
    for flags, message in (
        (["--gpu", "V100"], "--gpu V100 is not known; known are A10, A100"),
        (["--processes", "2"], "--processes 2 needs a --strategy that divides the work"),
        (["--max_step", "2"], "the nearest one is 'max_steps'"),
    ):
        assert main(["doctor", str(recipe), *flags]) == 2
        stderr = capsys.readouterr().err
        assert stderr.startswith("error: ") and stderr.count("\n") == 1 and message in stderr
