"""vLLM on a CPU serves converted models through its transformers backend: `make test-clients` makes its environment."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import lm_eval.tasks
import pytest
import torch
from transformers import AutoModelForCausalLM

from moh_llm.analysis.heads import heads_on

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("MOH_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"vLLM is not installed in {PYTHON}: make test-clients"),
]
SETTINGS = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
    **{"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "WARNING"},
}
VALUE = ["--context", "64", "--num-active-heads", "2"]
LOCAL = [*VALUE, "--fallback", "local", "--local-window", "6"]
START = [*LOCAL, "--local-start", "24", "budgets=even"]
PLANS = {
    "value fallback": VALUE,
    "value fallback by key-value groups": [*VALUE, "--routing-granularity", "kv_group"],
    "the paper's layer": ["--preset", "paper", "--num-shared-heads", "1", "--num-active-heads", "2"],
    "local fallback": [*LOCAL, "--local-start", "0", "budgets=even"],
    "local fallback, linear router, `local_start`": [*START, "--router", "linear"],
    "local fallback by key-value groups": [*START, "--routing-granularity", "kv_group"],
    "local fallback, no router": [*LOCAL, "--local-start", "0", "--router", "none"],
}
NO_PLUGIN = {"VLLM_PLUGINS": ""}  # what vLLM has where MoH-LLM is not installed: the model's own files
REMOTE = {"model_impl": "transformers", "trust_remote_code": True}
CACHED = "local fallback, linear router, `local_start`"
WITHOUT = ["value fallback", "value fallback by key-value groups", "the paper's layer"]
WITH = ["value fallback", *(name for name in PLANS if name.startswith("local"))]
CACHES = {
    "served twice, prefix caching": {"enable_prefix_caching": True},
    "a cache too small for all requests": {
        **{"scheduler_reserve_full_isl": False, "max_model_len": 128, "num_gpu_blocks_override": 6},
    },
}
PROMPTS = [[5, 80, 41, 200], list(range(1, 140, 3)), [7] * 20 + [90, 33], list(range(250, 40, -2))]


@pytest.fixture(scope="module")
def folders(made_once, make_llama, convert) -> dict[str, Path]:
    """Conversions of a LLaMA with heads of 32, the smallest that vLLM's CPU attention takes."""

    def make(number: int, plan: list[str]) -> Path:
        base = make_llama(hidden_size=128, head_dim=32, max_position_embeddings=256)
        return made_once(f"vllm-{number}", lambda folder: convert(base, folder / "moh", *plan, "--heldout-tokens", "0"))

    return {name: make(number, plan) / "moh" for number, (name, plan) in enumerate(PLANS.items())}


def environment() -> dict[str, str]:
    """Of vLLM's processes: without this repository's path, since MoH-LLM is installed there."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS


def serve(folder: Path, jobs: dict[str, dict], **variables: str) -> dict:
    """The client's reply to jobs, by their names, with its files in `folder`."""
    request = {"prompts": PROMPTS, "max_tokens": 12, "jobs": list(jobs.values())}
    (folder / "request.json").write_text(json.dumps(request))
    words = [PYTHON, Path(__file__).with_name("vllm_client.py"), folder / "request.json", folder / "reply.json"]
    ended = subprocess.run(words, cwd=folder, env=environment() | variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    reply = json.loads((folder / "reply.json").read_text())
    return reply | {"replies": dict(zip(jobs, reply["replies"], strict=True))}


@pytest.fixture(scope="module")
def remote(folders, tmp_path_factory) -> dict:
    """What vLLM gives without the plugin."""
    names = [*WITHOUT, "local fallback"]
    jobs = {name: {"model": str(folders[name]), "engine": REMOTE, "rounds": 1} for name in names}
    return serve(tmp_path_factory.mktemp("remote"), jobs, **NO_PLUGIN)


@pytest.fixture(scope="module")
def plugin(folders, tmp_path_factory) -> dict:
    """What it gives with the plugin."""
    jobs = {name: {"model": str(folders[name]), "engine": {}, "rounds": 1} for name in WITH}
    jobs |= {name: {"model": str(folders[CACHED]), "engine": more, "rounds": 2} for name, more in CACHES.items()}
    return serve(tmp_path_factory.mktemp("plugin"), jobs)


def check(reply: dict, folder: Path) -> None:
    """Tokens and log-probabilities are those of transformers."""
    assert "error" not in reply, reply["error"]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation="eager")
    for prompt, tokens, logprobs in zip(PROMPTS, reply["tokens"], reply["logprobs"], strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        assert tokens == expected[len(prompt) :].tolist()
        with torch.no_grad():
            scores = model(expected[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        exact = scores.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), exact, atol=1e-3, rtol=0)


def client(reply: dict) -> str:
    """Its name in the table."""
    return f"vllm-cpu {reply['vllm']}, transformers {reply['transformers']}"


SAME = "greedy tokens and log-probabilities of transformers"


@pytest.mark.parametrize("plan", WITHOUT)
def test_tokens_and_log_probabilities_are_those_of_transformers(folders, remote, plan, record):
    """Four requests at once, two of them prefilled in chunks of at most 32 tokens."""
    check(remote["replies"][plan], folders[plan])
    record(client(remote), f"{plan}: 4 requests at once, chunked prefill", SAME)


@pytest.mark.parametrize("plan", WITH)
def test_with_the_plugin_they_are_too(folders, plugin, plan, record):
    check(plugin["replies"][plan], folders[plan])
    record(f"{client(plugin)}, MoH-LLM", f"{plan}: 4 requests at once, chunked prefill", SAME)


def test_the_conversions_use_what_they_are_here_for(folders):
    """Heads that are routed, on and off, and heads that are never on."""
    for plan in ("local fallback", CACHED):
        model = AutoModelForCausalLM.from_pretrained(folders[plan], trust_remote_code=True)
        share = heads_on(model, torch.tensor(PROMPTS[3:]))[0, :, 40:].float().mean(1)
        assert ((share > 0) & (share < 1)).any() and (share == 0).any()


def test_prefix_caching_and_preemption_change_nothing(folders, plugin, record):
    cached, preempted = (plugin["replies"][name] for name in CACHES)
    for name in CACHES:
        check(plugin["replies"][name], folders[CACHED])
        record(f"{client(plugin)}, MoH-LLM", f"{CACHED}: {name}", SAME)
    assert cached["cached"] >= 32 and preempted["preempted"] > 0


def test_without_the_plugin_local_fallbacks_are_refused(remote, record):
    said = remote["replies"]["local fallback"]["error"]
    assert "head_fallback='local' reads keys that attn_implementation='vllm' keeps to itself" in said
    assert "install MoH-LLM in vLLM's environment" in said
    record(client(remote), "local fallback", "refused with a message that says to install MoH-LLM there")


@pytest.fixture
def server(folders, tmp_path) -> Iterator[str]:
    """The address of vLLM's server, which serves a conversion with local fallbacks."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    # `vllm serve` of the CPU build asks for the metadata of a package of the name vllm, and stops.
    words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folders["local fallback"]]
    words += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "256", "--port", str(port)]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(900):
                assert process.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


TASK = """
task: ends
dataset_path: json
dataset_kwargs: {data_files: {test: "FILE"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{sentence}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


def test_lm_eval_scores_the_server_as_it_scores_the_model(server, folders, tmp_path, record):
    facts = next((ROOT / "moh_llm" / "evaluation" / "suites" / "smoke").glob("*/facts/test.jsonl"))
    (tmp_path / "ends.yaml").write_text(TASK.replace("FILE", str(facts)))
    folder = folders["local fallback"]
    models = {
        "local-completions": f"model={folder},base_url={server},tokenizer={folder},max_length=256,num_concurrent=2",
        "hf": f"pretrained={folder},trust_remote_code=True,dtype=float32,max_length=256",
    }
    found = {}
    for model, arguments in models.items():
        manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
        found[model] = lm_eval.simple_evaluate(
            model, model_args=arguments, tasks=["ends"], task_manager=manager, device="cpu", bootstrap_iters=0
        )
    scores = [[answer[0] for answer in sample["filtered_resps"]] for sample in found["hf"]["samples"]["ends"]]
    served = [[a[0] for a in sample["filtered_resps"]] for sample in found["local-completions"]["samples"]["ends"]]
    assert len(scores) >= 10
    torch.testing.assert_close(torch.tensor(served), torch.tensor(scores), atol=1e-2, rtol=0)
    accuracies = [result["results"]["ends"]["acc,none"] for result in found.values()]
    assert accuracies[0] == accuracies[1]
    record(
        f"lm-eval {version('lm_eval')}",
        f"`local-completions` against vLLM's server, local fallback, {len(scores)} items",
        "log-likelihoods and accuracy of its `hf`",
    )
