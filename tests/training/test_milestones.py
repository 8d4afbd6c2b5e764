"""The models of milestones: saved on the way, like those of shorter runs, and without a trace in the run itself."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trained import read_log, unfinish

from moh_llm.evaluation.runs import read_runs
from moh_llm.hub.card import build_card
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training.loop import train

HUB = {"hub.repo_id": "org/moh", "hub.milestones": True, "checkpoint.milestone_every": 4}


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_milestones_leave_no_trace_in_the_run(configure, tmp_path):
    method = {"lora.rank": 4, "lora.dropout": 0.2, "schedule.anneal_steps": 5, "max_steps": 8}
    plain, asked = configure(output_dir=str(tmp_path / "plain"), **method), configure(**HUB, **method)
    saved: list[Path] = []
    train(plain)
    train(asked, on_milestone=saved.append)
    run = Path(asked.output_dir)
    assert saved == [run / "milestones" / "step-000004", run / "milestones" / "step-000008"]
    assert read_log(run) == read_log(tmp_path / "plain")
    assert_equal(weights_of(run / "model"), weights_of(tmp_path / "plain" / "model"))
    # That of the last step is the run's model, adapters merged; that of an earlier one has the final budget, too.
    assert_equal(weights_of(run / "model"), weights_of(saved[1] / "model"))
    early = MoHLlamaForCausalLM.from_pretrained(saved[0] / "model")
    assert early.config.active_heads_per_layer == [3, 1]
    assert not any("lora" in name for name in weights_of(saved[0] / "model"))


def test_a_milestone_reads_as_a_run_that_ended_there(configure):
    config = configure(**HUB)
    record = train(config)
    milestone = Path(config.output_dir) / "milestones" / "step-000004"
    (run,) = read_runs([milestone])
    assert [line.step for line in run.lines] == [0, 1, 2, 3, 4]
    assert (run.record.steps, run.record.tokens) == (4, 4 * 4 * 32) and run.record.seconds > 0
    assert sum(read["tokens"] for read in run.record.data_read.values()) == 4 * 4 * 32
    assert run.record.evaluation is None and record.evaluation
    assert {tensor.dtype for tensor in weights_of(milestone / "model").values()} == {torch.float32}
    card = build_card(milestone / "model", "org/moh", licence="mit")
    assert "The run has not finished" in card and "| steps | 4 of 6, each 4 sequences of 32 tokens |" in card
    assert "No training since" not in card and "saved model" not in card


@pytest.mark.slow
def test_a_milestone_that_was_missed_is_made_at_the_next_start(configure, tmp_path):
    config, saved = configure(**HUB, max_steps=8), []
    train(config)
    run = tmp_path / "run"
    wanted = weights_of(run / "milestones" / "step-000004" / "model")
    # As if it had been killed between the checkpoint of step 4 and its model.
    unfinish(run, 4)
    shutil.rmtree(run / "milestones")
    train(config, on_milestone=saved.append)
    assert [folder.name for folder in saved] == ["step-000004", "step-000008"]
    assert_equal(weights_of(saved[0] / "model"), wanted)
    assert [line["step"] for line in read_log(saved[0])] == [0, 1, 2, 3, 4]
    # What lies there is told at the next start, also of a finished run.
    again: list[Path] = []
    train(config, on_milestone=again.append)
    assert again == saved
