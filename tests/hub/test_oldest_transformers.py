"""Published models load with the oldest transformers that they support, and say so where one is too old or broken."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moh_llm.hub import proof
from moh_llm.hub.proof import compare, loading_fault
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.model import read_config

OLDEST = Path(sys.prefix) / "oldest-transformers"
RUN = """
import runpy, sys
packages, script, *requests = sys.argv[1:]
sys.path.insert(0, packages)
for request in requests:
    sys.argv[1:] = [request]
    runpy.run_path(script, run_name="__main__")
"""
CONFIGURATION = Path(__file__).resolve().parents[2] / "moh_llm" / "modeling" / "configuration_moh_llama.py"


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="make test installs tests/oldest-transformers.txt")
def test_the_oldest_gives_what_the_newest_gives(make_model, tmp_path, monkeypatch):
    plan = {"num_shared_heads": 1, "num_active_heads": 3, "router_type": "linear", "head_fallback": "value"}
    folders = {
        "untied": make_model(MoHLlamaConfig),
        "tied": make_model(MoHLlamaConfig, tie_word_embeddings=True, **plan),
        "experts": make_model(MoHLlamaConfig, num_local_experts=4, **plan),
    }
    for name, folder in folders.items():
        request = {"folder": str(folder), "threads": 1, "fields": read_config(folder)}
        request |= {"tensors": str(tmp_path / f"{name}.safetensors"), "record": str(tmp_path / f"{name}.json")}
        (tmp_path / f"{name}.request.json").write_text(json.dumps(request))
    command = [sys.executable, "-c", RUN, str(OLDEST), proof.__file__]
    command += [str(tmp_path / f"{name}.request.json") for name in folders]
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    done = subprocess.run(["env", "-u", "PYTHONPATH", *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (version,) = re.findall(r"transformers==(\S+)", (Path(__file__).parents[1] / "oldest-transformers.txt").read_text())
    for name, folder in folders.items():
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["versions"]["transformers"] == version
        assert loading_fault(record) is None
        assert compare(tmp_path / f"{name}.safetensors", folder, read_config(folder)) is None


@pytest.mark.parametrize("version", ["5.1.0", "5.3.0"])
def test_other_versions_are_refused_in_a_line(monkeypatch, version):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(ImportError, match=rf"transformers>=5.2,!=5.3.0 is required.*found transformers=={version}"):
        exec(compile(CONFIGURATION.read_text(), str(CONFIGURATION), "exec"), {"__name__": "moh_llm.modeling.published"})
