"""The start of a run on several processes: who reads and hashes what, and what each of them holds."""

import json
from pathlib import Path

import forks
import pytest
import torch
from ways import DDP, FSDP, ROOT

from moh_llm.records.seal import Seal

FSDP = FSDP | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}  # as in recipes/accelerate/fsdp2.yaml

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
# Stops where the first step would begin, and writes what this process has done until then.
START = """
import json, os, sys
import torch
from transformers import PreTrainedModel
from moh_llm.records import seal
from moh_llm.training import loop, networks, sharding
from moh_llm.training.recipe import load_config
found = {"loaded": 0}
load, distribute = networks.MoHLlamaForCausalLM.from_pretrained, sharding.distribute
def counted(*args, **kwargs):
    found["loaded"] += 1
    return load(*args, **kwargs)
def watched(accelerator, module, config):
    step, optimizer = distribute(accelerator, module, config)
    inner = accelerator.unwrap_model(step)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in inner.parameters()]
    found["held"] = sum(part.numel() for part in parts)
    found["total"] = sum(p.numel() for p in inner.parameters())
    found["optimized"] = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    found["teacher"] = sum(p.numel() for p in inner.teacher.parameters())
    return step, optimizer
def stop(*_):
    found["hashed"] = seal._sha256_of.cache_info().misses
    with open(f"{sys.argv[2]}.{os.environ['RANK']}.json", "w") as file:
        json.dump(found, file)
    torch.distributed.barrier()  # the others may still be connecting to this one
    os._exit(0)
networks.MoHLlamaForCausalLM.from_pretrained = counted
sharding.distribute, loop.start_trackers = watched, stop
loop.train(load_config(sys.argv[1], [f"--output_dir={sys.argv[2]}", "--evaluation.eval_steps=0"]))
"""


def start(environment: dict[str, str], recipe: Path, output: Path, processes: int = 2) -> list[dict[str, int]]:
    """What each process has done when the first step would begin."""
    done = forks.run("-c", START, recipe, output, folder=ROOT, environment=environment, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{output}.{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
def test_no_process_of_fsdp2_holds_a_whole_model(recipe, tmp_path):
    found = start(FSDP, recipe, tmp_path / "run")
    total = found[0]["total"]
    assert sum(each["held"] for each in found) == total
    for each in found:
        assert each["loaded"] == 0 and each["held"] < 0.55 * total
        assert each["teacher"] + each["optimized"] == total and each["teacher"] > 0.4 * total


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(DDP, id="ddp"), pytest.param(FSDP, id="fsdp2", marks=pytest.mark.slow)])
def test_the_weights_are_hashed_once(model_folder, recipe, tmp_path, way):
    first, second = start(way, recipe, tmp_path / "run")
    files = [name for name in Seal.read(model_folder / "seal.json").files if not name.endswith(".py")]
    assert (first["hashed"], second["hashed"]) == (len(files), 0)
