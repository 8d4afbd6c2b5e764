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
VLLM = "0.32.0"  # the Makefile's
LOCAL = ["--context", "64", "--fallback", "local", "--local-window", "6", "--active-ratio", "0.5"]
PLANS = {
    "value": ["--active-ratio", "0.5", "--context", "64"],
    "kv_group": ["--active-ratio", "0.5", "--context", "64", "--routing-granularity", "kv_group"],
    "paper": ["--preset", "paper", "--num-shared-heads", "1", "--active-ratio", "0.5"],
    "none": ["--active-ratio", "0.5", "--context", "64", "--fallback", "none"],
    "local": [*LOCAL, "--local-start", "0", "--budgets", "even"],
    "local start": [*LOCAL, "--local-start", "24", "--budgets", "even"],
    "local kv_group": [*LOCAL, "--local-start", "24", "--budgets", "even", "--routing-granularity", "kv_group"],
    "local linear": [*LOCAL, "--local-start", "24", "--budgets", "even", "--router", "linear"],
    "local never on": [*LOCAL, "--local-start", "0", "--router", "none"],
}
PROMPTS = [[5, 80, 41, 200], list(range(1, 140, 3)), [7] * 20 + [90, 33], list(range(250, 40, -2))]


@pytest.fixture(scope="module")
def folders(made_once, make_llama, convert) -> dict[str, Path]:
    """Conversions of a LLaMA with heads of 32, the smallest that vLLM's CPU attention takes."""

    def make(name: str) -> Path:
        base = make_llama(hidden_size=128, head_dim=32, max_position_embeddings=256)
        return made_once(f"vllm-{name}", lambda folder: convert(base, folder / "moh", *PLANS[name], "--verify", "none"))

    return {name: make(name) / "moh" for name in PLANS}


def environment() -> dict[str, str]:
    """Of vLLM's processes: without this repository, which does not go with its version of transformers."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS


def start(model: Path, folder: Path, **request: object) -> subprocess.CompletedProcess:
    """The client on a model, with files in `folder`."""
    (folder / "request.json").write_text(json.dumps({"model": str(model)} | request))
    words = [PYTHON, Path(__file__).with_name("vllm_client.py"), folder / "request.json", folder / "reply.json"]
    return subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("plan", ["value", "kv_group", "paper"])
def test_tokens_and_log_probabilities_are_those_of_transformers(folders, tmp_path, plan, record):
    """Four requests at once, two of them prefilled in chunks of at most 32 tokens."""
    ended = start(folders[plan], tmp_path, prompts=PROMPTS, max_tokens=12, step_tokens=32)
    assert ended.returncode == 0, ended.stderr[-2000:]
    reply = json.loads((tmp_path / "reply.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folders[plan], trust_remote_code=True, attn_implementation="eager")
    for prompt, tokens, logprobs in zip(PROMPTS, reply["tokens"], reply["logprobs"], strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        assert tokens == expected[len(prompt) :].tolist()
        with torch.no_grad():
            scores = model(expected[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        exact = scores.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), exact, atol=1e-3, rtol=0)
    client = f"vllm-cpu {reply['vllm']}, transformers {reply['transformers']}"
    names = {"value": "value fallback", "kv_group": "value fallback by key-value groups", "paper": "the paper's layer"}
    record(
        client,
        f"{names[plan]}: 4 requests at once, chunked prefill",
        "greedy tokens and log-probabilities of transformers",
    )


def test_local_fallbacks_are_refused(folders, tmp_path, record):
    ended = start(folders["local"], tmp_path, prompts=PROMPTS[:1], max_tokens=2, step_tokens=32)
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr  # vLLM prints it in one or the other
    assert "head_fallback='local' reads keys that attn_implementation='vllm' keeps to itself" in said
    client = f"vllm-cpu {VLLM}"
    record(
        client,
        "local fallback",
        "refused in a line: the engine keeps the keys to itself; convert with `--fallback value`",
    )


@pytest.fixture
def server(folders, tmp_path) -> Iterator[str]:
    """The address of vLLM's server, which serves the value conversion."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    flags = ["--model-impl", "transformers", "--trust-remote-code", "--enforce-eager", "--dtype", "float32"]
    # `vllm serve` of the CPU build asks for the metadata of a package of the name vllm, and stops.
    words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folders["value"], *flags]
    words += ["--max-model-len", "256", "--port", str(port)]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(300):
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
    folder = folders["value"]
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
    client = f"lm-eval {version('lm_eval')}"
    record(
        client,
        f"`local-completions` against vLLM's server, {len(scores)} items",
        "log-likelihoods and accuracy of its `hf`",
    )
