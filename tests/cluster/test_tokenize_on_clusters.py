"""`moh-llm tokenize` on a real Slurm and a real Ray of two nodes: the shards that this process writes."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from moh_llm.cli import main
from moh_llm.data.shards import open_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def job(tmp_path: Path, byte_tokenizer) -> list[str]:
    """Arguments of a command that tokenises two sources into `tmp_path/tokens`, one of two files; what this process
    makes of them is in `tmp_path/here`.
    """
    for number, name in enumerate(("one-0", "one-1", "two")):
        lines = [json.dumps({"text": f"{name}, {i}: " + "the boats lay tied below the mill. " * i}) for i in range(90)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[number:]) + "\n")
    sources = {"one": {"weight": 2, "files": "one-*.jsonl"}, "two": {"weight": 1, "files": "two.jsonl"}}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump({"name": "made", "sources": sources}))
    byte_tokenizer(tmp_path / "tokenizer")
    command = ["tokenize", str(tmp_path / "mixture.yaml"), "--tokenizer", str(tmp_path / "tokenizer")]
    assert main([*command, "--output-dir", str(tmp_path / "here"), "--workers", "1"]) == 0
    return [*command, "--output-dir", str(tmp_path / "tokens")]


def shards(folder: Path) -> dict[str, str]:
    """Hashes of shards, indices and metadata."""
    files = [path for path in sorted(folder.rglob("*.ds*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run(job: list[str], environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "moh_llm.cli", *job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_slurm(slurm, job, tmp_path):
    said = run([*job, "--executor", "slurm", "--executor-args", "time=00:10:00", "partition=all"], slurm.environment)
    assert "submitted to Slurm" in said
    record, deadline = tmp_path / "tokens" / "mixture.json", time.monotonic() + 600
    while '"finished"' not in (record.read_text() if record.exists() else ""):
        said = slurm.ask("squeue")
        assert "\n" in said and time.monotonic() < deadline, said  # the heading alone: the jobs ended without
        time.sleep(0.5)
    assert [source.name for source in open_tokens(tmp_path / "tokens")] == ["one", "two"]
    assert shards(tmp_path / "tokens") == shards(tmp_path / "here")


def test_ray(job, tmp_path):
    pytest.importorskip("ray", reason="no Ray here: pip install ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        del node["include_dashboard"]
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address}
        run([*job, "--executor", "ray", "--workers", "2", "--executor-args", "mem_per_cpu_gb=0.1"], environment)
    finally:
        cluster.shutdown()
    assert shards(tmp_path / "tokens") == shards(tmp_path / "here")
