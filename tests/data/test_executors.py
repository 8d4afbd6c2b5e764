"""Slurm: the same shards as here. It is played by scripts that run what they are handed at once.

On a real Slurm and on Ray: `tests/cluster`.
"""

import os
import stat
import sys
from pathlib import Path

import pytest

from moh_llm.data.mixture import load_mixture
from moh_llm.data.shards import open_tokens
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.errors import UserError

SBATCH = """#!/bin/bash
# Run every member of the array, one after the other, as sbatch would have nodes do.
for argument in "$@"; do
  case $argument in --export=*RUN_OFFSET=*) export RUN_OFFSET=${argument##*=};; esac
done
script="${@: -1}"
echo "$@" >> "$SLURM_PLAY/submitted"
grep '^#SBATCH' "$script" >> "$SLURM_PLAY/directives"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for member in $(seq 0 "$last"); do
  SLURM_ARRAY_TASK_ID=$member SLURM_NODELIST=here bash "$script" >> "$SLURM_PLAY/log" 2>&1
done
echo "Submitted batch job 7"
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -n ]] && shift; shift; done
exec "$@"
"""
SCONTROL = "#!/bin/bash\necho here\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scripts on the path; returns the folder of what they were given."""
    play = tmp_path / "slurm"
    play.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (play / name).write_text(text)
        (play / name).chmod(0o755 | stat.S_IEXEC)
    monkeypatch.setenv("SLURM_PLAY", str(play))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    # launch_pickled_pipeline lies beside this Python.
    monkeypatch.setenv("PATH", os.pathsep.join([str(play), str(Path(sys.executable).parent), os.environ["PATH"]]))
    return play


@pytest.mark.slow
def test_slurm_writes_the_same_shards_and_the_record(corpus, tokenizer, tmp_path, slurm, shards):
    tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "here", workers=1)
    options = {"time": "01:00:00", "partition": "cpu", "mem_per_cpu_gb": "4", "qos": ""}
    found = tokenize_mixture(
        load_mixture(corpus), tokenizer, tmp_path / "there", executor="slurm", executor_args=options
    )
    assert found is None
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert [s.name for s in open_tokens(tmp_path / "there")] == ["plain", "packed", "chosen"]
    directives = (slurm / "directives").read_text()
    assert "--mem-per-cpu=4G" in directives and "--partition=cpu" in directives and "--qos" not in directives
    assert "afterok:7" in (slurm / "submitted").read_text()  # the record waits for the shards


def test_a_job_that_slurm_refuses_is_told(corpus, tokenizer, tmp_path, slurm, monkeypatch):
    (slurm / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: no such partition' >&2\nexit 1\n")
    options = {"time": "1:00", "partition": "a"}
    with pytest.raises(UserError, match=r"--executor slurm: .*sbatch"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "o", executor="slurm", executor_args=options)
    with pytest.raises(UserError, match=r"--executor slurm: .*'partition'; --executor-args KEY=VALUE"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "o", executor="slurm", executor_args={"time": "1"})
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without Slurm
    with pytest.raises(UserError, match=r"--executor slurm: .*sbatch"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "o", executor="slurm", executor_args=options)


def test_a_machine_without_ray_is_told(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # whatever this machine has
    with pytest.raises(UserError, match="--executor ray needs ray; pip install ray"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", executor="ray")
