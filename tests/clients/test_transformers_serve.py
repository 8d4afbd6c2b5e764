"""`moh-llm serve`: transformers' server answers as the model generates, also in continuous batching."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import moh_llm  # noqa: F401  # registers the classes

pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytestmark = [pytest.mark.clients, pytest.mark.slow]
PLANS = {
    "value": ["--num-active-heads", "2", "--context", "64"],
    "local": ["--keys", "0.78", "--context", "64", "--fallback", "local", "--local-window", "6"],
}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
# By default the cache takes what memory there is, and warming up tens of seconds.
BATCHED = ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "256"]
QUESTIONS = ["Where does the river go?", "Who waits at the mill, and for whom, this spring?", "Why?"]


@pytest.fixture(scope="module")
def folders(made_once, make_llama, convert) -> dict[str, Path]:
    """Conversions with a chat template."""

    def make(name: str, folder: Path) -> None:
        convert(make_llama(max_position_embeddings=256), folder / "moh", *PLANS[name], "--heldout-tokens", "0")
        tokenizer = AutoTokenizer.from_pretrained(folder / "moh")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / "moh")

    return {name: made_once(f"served-{name}", lambda folder, n=name: make(n, folder)) / "moh" for name in PLANS}


@contextlib.contextmanager
def serve(folder: Path, log: Path, *flags: str) -> Iterator[str]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    words = [sys.executable, "-m", "moh_llm.cli", "serve", str(folder), "--device", "cpu", "--host", "127.0.0.1"]
    with log.open("w") as file:
        process = subprocess.Popen([*words, "--port", str(port), *flags], stdout=file, stderr=subprocess.STDOUT)
        try:
            for _ in range(120):
                assert process.poll() is None, log.read_text()[-2000:]
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1/chat/completions"
        finally:
            process.terminate()
            process.wait(30)


def ask(address: str, folder: Path, question: str) -> str:
    body = {
        "model": str(folder),
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 12,
    }
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("flags", [[], BATCHED], ids=["one_by_one", "continuous_batching"])
@pytest.mark.parametrize("name", PLANS)
def test_it_answers_as_the_model_generates(folders, tmp_path, record, name, flags) -> None:
    folder = folders[name]
    with serve(folder, tmp_path / "log", *flags) as address, ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda question: ask(address, folder, question), QUESTIONS))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert answer == tokenizer.decode(out, skip_special_tokens=True)
    how = f"`moh-llm serve`{', `--continuous-batching`' if flags else ''}, {name} fallback, 3 requests at once"
    record(f"transformers {transformers.__version__}", how, "the replies that `generate` gives")
