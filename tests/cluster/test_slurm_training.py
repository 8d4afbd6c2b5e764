"""A training job on a real Slurm: preempted, out of time, a node killed, and at the end the log of an unbroken run."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
STEPS, DONE = 300, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def lines(run: Path) -> list[dict[str, object]]:
    """The steps of a run, without what differs between any two."""
    log = run / "log.jsonl"
    found = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
    return [{name: value for name, value in line.items() if name != "timing"} for line in found]


class Job:
    """A training job and the file of what it prints."""

    def __init__(self, slurm, recipe: Path, run: Path):
        self.slurm, self.run, self.said = slurm, run, run.with_suffix(".out")
        options = ["--nodes=2", "--ntasks-per-node=1", f"--output={self.said}", "--parsable"]
        words = ["recipes/launch/slurm.sbatch", "ddp", recipe, run]
        cpu = {"GPUS": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "SLURM_WAIT": "20"}
        self.id = slurm.ask("sbatch", *options, *words, **cpu)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait; a job that ended before is an error."""
        deadline = time.monotonic() + 600
        while not holds():
            state = self.state()
            ended = state.startswith(DONE) and not holds()
            assert not ended and time.monotonic() < deadline, f"{state}\n{self.said.read_text()[-4000:]}"
            time.sleep(0.1)

    def state(self) -> str:
        """Its state, and how often it was requeued."""
        shown = self.slurm.show(self.id)
        return f"{shown['JobState']},{shown['Restarts']}"

    def until_step(self, number: int) -> None:
        self.until(lambda: len(lines(self.run)) >= number)

    def until_requeued(self, times: int) -> None:
        """Wait for it, and have the job start soon, where Slurm lets two minutes go by.

        Not at once: nodes refuse a job that begins in the second in which it was ended.
        """
        self.until(lambda: self.state() == f"PENDING,{times}")
        self.slurm.ask("scontrol", "update", f"JobId={self.id}", "TimeLimit=60", "StartTime=now+5")
        self.until(lambda: self.state() == f"RUNNING,{times}")


@pytest.fixture
def recipe(make_llama: Callable[..., Path], convert: Callable[..., int], river: Path, tmp_path: Path) -> Path:
    """A recipe on the conversion of a random model of 2 layers."""
    convert(
        make_llama(max_position_embeddings=64, tie_word_embeddings=True), tmp_path / "moh", "--num-active-heads", "2"
    )
    mixture = {"name": "river", "sources": {"river": {"weight": 1, "files": str(river)}}}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    content = {
        "model": str(tmp_path / "moh"),
        "output_dir": str(tmp_path / "run"),
        "max_steps": STEPS,
        "data": {"mixture": str(tmp_path / "mixture.yaml"), "sequence_length": 32, "batch_size": 4},
        "evaluation": {"eval_steps": 0},
        "checkpoint": {"save_steps": 20},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "recipe.yaml"


def test_a_job_that_is_stopped_and_killed_gives_the_log_of_one_that_is_not(slurm, recipe, tmp_path):
    job = Job(slurm, recipe, tmp_path / "broken")
    job.until_step(25)
    slurm.ask("scancel", "--signal=USR1", "--batch", job.id)  # as preemption does
    job.until_requeued(1)
    stopped = len(lines(job.run))
    said = job.said.read_text()
    assert f"stopped by a signal after step {stopped}, which is saved" in said
    assert said.count("as asked; give the same command again") == 2 and "Traceback" not in said  # a line for each node

    job.until_step(stopped + 25)
    hours, minutes, _ = slurm.show(job.id)["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 2  # of less than two minutes, before which the job is told
    with slurm.held(job.id) as signalled:  # Slurm looks at the times of jobs every half a minute
        slurm.ask("scontrol", "update", f"JobId={job.id}", f"TimeLimit={limit}")
        job.until(signalled)
    job.until_requeued(2)
    said = job.said.read_text()
    assert f"resumed from {job.run}/checkpoints/step-{stopped:06d}" in said and "Traceback" not in said
    job.until_step(len(lines(job.run)) + 25)

    assert slurm.kill_step(job.id, slurm.nodes[1]) >= 2
    job.until_requeued(3)
    job.until(lambda: job.state() == "COMPLETED,3")
    assert f"finished: {job.run}" in job.said.read_text()

    unbroken = Job(slurm, recipe, tmp_path / "unbroken")
    unbroken.until(lambda: unbroken.state() == "COMPLETED,0")
    assert len(lines(unbroken.run)) == STEPS and lines(job.run) == lines(unbroken.run)
