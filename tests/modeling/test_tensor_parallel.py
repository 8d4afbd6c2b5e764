"""Transformers' tensor parallelism: each process computes its heads, and routes over all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
from transformers import GenerationConfig

from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.modeling.routing_moh import HeadShard

ROOT = Path(__file__).resolve().parents[2]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}
LOCAL = {"head_fallback": "local", "local_window": 4, "local_sinks": 2}
UNEVEN = {"num_shared_heads": [1, 2], "num_active_heads": [5, 6], "shared_heads": [[3], [0, 6]]}
PLANS = {
    "value": UNEVEN | {"router_type": "linear", "head_fallback": "value"},
    "threshold": UNEVEN | LOCAL | {"router_type": "threshold", "local_start": 8},
    # Two devices: the first has all heads that are never on, or none of a layer's.
    "never on": UNEVEN | LOCAL | {"router_type": "threshold", "local_start": 8, "never_on_heads": [[0, 1, 2], [4, 5]]},
    "fixed": LOCAL | {"router_type": "none", "shared_heads": [[0, 1, 2, 3], [1, 4]], "num_shared_heads": [4, 2]},
    "groups": LOCAL
    | {"router_type": "threshold", "routing_granularity": "kv_group", "num_shared_heads": 2, "num_active_heads": 4},
    "experts": UNEVEN | {"router_type": "linear", "num_local_experts": 4},
    "paper": {"router_type": "query_norm", "num_shared_heads": 2, "num_active_heads": 6},
}
PLANS["fixed"]["num_active_heads"] = PLANS["fixed"]["num_shared_heads"]
# Every process prints what it has, since each of them samples its next token from it.
WORKER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig
torch.set_num_threads(1)
remote = sys.argv[2] == "remote"
for folder in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto"), trust_remote_code=remote, dtype=torch.float32
    ).eval()
    assert type(model).__module__.startswith("transformers_modules." if remote else "moh_llm."), type(model).__module__
    given = torch.load(f"{folder}/given.pt", weights_only=True)
    with torch.no_grad():
        rows = model(given["ids"]).logits, model(given["ids"], attention_mask=given["mask"]).logits
        packed = model(given["ids"][:1], position_ids=given["positions"]).logits
    width = model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0]
    written = model.generate(given["ids"], generation_config=GenerationConfig(**json.loads(sys.argv[1])))
    found = {"width": width, "logits": [*rows, packed], "written": written}
    torch.save(found, f"{folder}/{torch.distributed.get_rank()}.pt")
"""


def make_inputs(vocabulary: int) -> dict[str, torch.Tensor]:
    """Rows of 24 tokens; a mask with padding on the left; positions of two documents in one row."""
    ids = torch.randint(1, vocabulary, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"ids": ids, "mask": mask, "positions": torch.cat([torch.arange(9), torch.arange(15)])[None]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "code"),
    [
        (2, "package"),
        (2, "remote"),
        (4, "package"),
    ],
)
def test_logits_and_tokens_are_those_of_one_process(make_pair, make_model, tmp_path, processes, code) -> None:
    folders, expected = [], []
    for name, plan in PLANS.items():
        if "num_local_experts" in plan:  # which no LLaMA has
            model = MoHLlamaForCausalLM.from_pretrained(make_model(MoHLlamaConfig, **HEADS, **plan)).eval()
        else:
            _, model = make_pair(**HEADS, **plan)
        folder = tmp_path / name.replace(" ", "_")
        model.save_pretrained(folder)
        given = make_inputs(model.config.vocab_size)
        torch.save(given, folder / "given.pt")
        with torch.no_grad():
            logits = [
                model(given["ids"]).logits,
                model(given["ids"], attention_mask=given["mask"]).logits,
                model(given["ids"][:1], position_ids=given["positions"]).logits,
            ]
        folders.append(folder)
        width = model.model.layers[0].self_attn.q_proj.out_features
        expected.append((logits, model.generate(given["ids"], generation_config=GenerationConfig(**GREEDY))))
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    words = [json.dumps(GREEDY), code, *folders]
    if code == "package":
        words = ["-c", "import moh_llm" + WORKER, *words]
        done = forks.run(*words, folder=tmp_path, environment=environment, processes=processes)
    else:  # in interpreters that have not imported the package
        (tmp_path / "worker.py").write_text(WORKER)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*launch, tmp_path / "worker.py", *words]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, folder, (logits, written) in zip(PLANS, folders, expected, strict=True):
        for rank in range(processes):
            found = torch.load(folder / f"{rank}.pt", weights_only=True)
            assert found["width"] == width // processes, name
            for mine, theirs in zip(found["logits"], logits, strict=True):
                # Partial sums of four processes are added in another order: 1.2e-5 on an AMD EPYC with AVX2.
                torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
            assert torch.equal(found["written"], written), name


def test_key_value_heads_that_do_not_divide_are_refused(make_pair) -> None:
    _, model = make_pair(**HEADS, **PLANS["value"])
    weight = SimpleNamespace(device_mesh=SimpleNamespace(ndim=1, size=lambda: 3))
    with pytest.raises(ValueError, match="4 key-value heads cannot be split over 3 devices"):
        HeadShard.from_weight(weight, 8 / 3, model.config)
