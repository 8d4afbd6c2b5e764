"""The commands of README.md, from top to bottom as they stand there, on a tiny base and without a network."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from tiny import save_model

from moh_llm.cli import main

ROOT = Path(__file__).resolve().parents[1]
# They make an environment, need the Hub, another base or a compiler, or have tests of their own.
ELSEWHERE = (
    "make quickstart",
    "pip install",
    "python -m pytest",
    "python convert.py recipes/convert_llama3_8b.yaml",  # a base on the Hub
    "recipes/launch/one_node.sh zero2",  # tests/training/test_launchers.py
    "moh-llm data fetch-benchmarks",  # tests/evaluation/test_eval_fetch.py
)


def commands() -> list[list[str]]:
    """The words of each command of README's blocks that is run here; a variable before a command is not one of them."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines = [line for line in lines if line and not line.startswith(ELSEWHERE)]
    return [[word for word in shlex.split(line, comments=True) if "CORPORA=" not in word] for line in lines]


def test_each_says_what_runs_it():
    found = commands()
    assert len(found) > 10 and all(words[0] == "moh-llm" or words[1].endswith(".py") for words in found), found


@pytest.mark.slow
def test_they_run_one_after_the_other(tmp_path, monkeypatch, capsys, one_thread):
    pytest.importorskip("lm_eval")
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "data_mixtures"):
        shutil.copytree(ROOT / name, tmp_path / name)
    # Nine heads, as SmolLM2 has: the head counts of README are then possible.
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "vectors": False}
    save_model(tmp_path / "BASE", LlamaConfig, **heads, max_position_embeddings=512)
    (tmp_path / "BASE" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n\nA base.\n")
    text = "The river was high that spring, and the boats lay tied to the poplars below the mill. " * 8
    records = "".join(json.dumps({"text": f"{number}. {text}"}) + "\n" for number in range(64))
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text(records)
    Path("c.txt").write_text(text)
    import zstandard

    Path("b.jsonl.zst").write_bytes(zstandard.compress(records.encode()))
    for source in re.findall(r"\$CORPORA/(\w+)/", Path("data_mixtures/paper_local.yaml").read_text()):
        (tmp_path / "corpora" / source).mkdir(parents=True)
        (tmp_path / "corpora" / source / "train.jsonl").write_text(records)
    monkeypatch.setenv("CORPORA", str(tmp_path / "corpora"))

    for words in commands():
        given = words[1:] if words[0] == "moh-llm" else [words[1].removesuffix(".py"), *words[2:]]
        given = ["smoke" if word == "paper" and given[0] == "evaluate" else word for word in given]
        if "--data-dir" in given:  # the suite in the package has its data
            place = given.index("--data-dir")
            given = given[:place] + given[place + 2 :]
        status = main(given)
        said = capsys.readouterr()
        assert status == (1 if given[0] == "doctor" else 0), (given, said.err[-2000:])
        assert "nothing to do" not in said.out + said.err, given
