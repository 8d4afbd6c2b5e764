"""The proof's clean process, forked from one that has imported torch and transformers and never saw `moh_llm`.

A fresh interpreter spends most of its time on these imports. The rest is as in `moh_llm.hub.proof`: the same script
with the same arguments, environment, working folder and cache of modules, its exit status and all that it prints.
"""

import atexit
import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PARENT = """
import gc, json, os, runpy, sys, traceback
import transformers.dynamic_module_utils as modules
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

gc.freeze()  # the script collects garbage: not among these modules
for line in sys.stdin:
    words, folder, environment, errors = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(2, 1)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        modules.HF_MODULES_CACHE = environment["HF_MODULES_CACHE"]  # read when transformers was imported
        sys.argv = words
        assert "moh_llm" not in sys.modules
        try:
            runpy.run_path(words[0], run_name="__main__")
        except Exception:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)  # at once: what it wrote is closed
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _parent() -> "subprocess.Popen[str]":
    command = [sys.executable, "-I", "-c", _PARENT]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(parent.kill)
    return parent


def run(command: Sequence[str], cwd: Path, env: Mapping[str, str], **_: object) -> "subprocess.CompletedProcess[str]":
    """In place of `subprocess.run`, for `python -I SCRIPT REQUEST.json`."""
    assert list(command[:2]) == [sys.executable, "-I"]
    parent, errors = _parent(), cwd.parent / "errors"
    assert parent.stdin is not None and parent.stdout is not None
    parent.stdin.write(json.dumps([command[2:], str(cwd), dict(env), str(errors)]) + "\n")
    parent.stdin.flush()
    status = int(parent.stdout.readline())
    return subprocess.CompletedProcess(command, status, "", errors.read_text())  # with what it prints
