"""The start of a run on several processes: who reads and hashes what, and what each of them holds."""

import json
from pathlib import Path

import forks
import pytest
import torch
from ways import FSDP, ROOT

FSDP = FSDP | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}  # as in recipes/accelerate/fsdp2.yaml

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
# Stops where the first step would begin, and writes what this process has done until then.
START = """
import json, os, sys
import torch
from transformers import PreTrainedModel
from moh_llm.training import loop, networks, sharding
from tests.trained import load_config
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
    with open(f"{sys.argv[2]}.{os.environ['RANK']}.json", "w") as file:
        json.dump(found, file)
    torch.distributed.barrier()  # the others may still be connecting to this one
    os._exit(0)
networks.MoHLlamaForCausalLM.from_pretrained = counted
sharding.distribute, loop.start_trackers = watched, stop
loop.train(load_config(sys.argv[1], [f"--output-dir={sys.argv[2]}", "--evaluation.eval_steps=0"]))
"""


@pytest.mark.slow
def test_no_process_of_fsdp2_holds_a_whole_model(recipe, tmp_path):
    output = tmp_path / "run"
    done = forks.run("-c", START, recipe, output, folder=ROOT, environment=FSDP, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(Path(f"{output}.{rank}.json").read_text()) for rank in range(2)]
    total = found[0]["total"]
    assert sum(each["held"] for each in found) == total
    for each in found:
        assert each["loaded"] == 0 and each["held"] < 0.55 * total
        assert each["teacher"] + each["optimized"] == total and each["teacher"] > 0.4 * total
