"""What is said where Slurm or Ray is missing. On a real Slurm and on Ray: `tests/cluster`."""

import sys

import pytest

from moh_llm.data.mixture import load_mixture
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.errors import UserError


def test_what_slurm_lacks_is_told(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without Slurm
    for options, fault in (
        ({"time": "1:00"}, r"--executor slurm: .*'partition'; --executor-args KEY=VALUE"),
        ({"time": "1:00", "partition": "a", "memory": "4"}, r"--executor slurm: .*'memory'"),
        ({"time": "1:00", "partition": "a"}, r"--executor slurm: .*sbatch"),
    ):
        with pytest.raises(UserError, match=fault):
            tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "o", executor="slurm", executor_args=options)


def test_a_machine_without_ray_is_told(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # whatever this machine has
    with pytest.raises(UserError, match="--executor ray needs ray; pip install ray"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", executor="ray")
