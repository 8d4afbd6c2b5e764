"""The notebooks of examples/ run on a tiny base, and hold outputs of a run on a real one."""

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moh_llm.flags import OptionParser

pytest.importorskip("nbclient")
from notebooks import EXECUTED, FOLDER, execute, read, texts

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
NOT_RUN = "4_llama3_8b"


@pytest.mark.slow
def test_they_run_on_a_tiny_base(make_llama, tmp_path, monkeypatch) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("matplotlib")
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
    base = make_llama(max_position_embeddings=512, num_hidden_layers=3, initializer_range=0.3, **heads)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    monkeypatch.setenv("MOH_BASE", str(base))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    (tmp_path / "work").mkdir()

    converted, recovered, used = (texts(execute(name, tmp_path / "work")) for name in EXECUTED)
    assert "equals the base's: True" in converted[3] and "perplexity x " in converted[3]
    assert "keys read: " in converted[4] and converted[5].count("keys read: ") == 3
    assert converted[-1] == "True\n"  # with all heads on the logits are the base's
    assert [line.split()[0] for line in recovered[-1].splitlines()[1:]] == ["converted", "tuned"]
    generated, again = used[2], used[4]
    assert generated.startswith("The river rises in the mountains and") and generated.strip("\n") in again
    assert "the pipeline's reply: True" in used[6]


@pytest.mark.parametrize("name", EXECUTED)
def test_outputs_are_kept_and_name_no_place_of_a_machine(name) -> None:
    notebook = read(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and all(output.output_type != "error" for output in outputs)
    kept = json.dumps([{k: v for k, v in o.items() if k != "data"} | {"data": _text_of(o)} for o in outputs])
    assert not re.search(r"(?<![\w.~-])/(?:root|home|Users|work|tmp|var|usr|opt|mnt|data)/", kept)
    assert "MOH_BASE" not in kept and len((FOLDER / f"{name}.ipynb").read_bytes()) < 400_000


def _text_of(output) -> dict:
    return {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}


def test_its_commands_are_understood() -> None:
    source = "\n".join(cell.source for cell in read(NOT_RUN).cells if cell.cell_type == "code").replace("\\\n", " ")
    calls = [shlex.split(found) for found in re.findall(r"(?:moh-llm|moh_llm\.cli) (.*)", source)]
    assert {words[0] for words in calls} >= {"recipes", "mixture", "tokenize", "doctor", "data", "evaluate", "publish"}
    for words in calls:
        parser = OptionParser()
        import_module(f"moh_llm.commands.{words[0]}").add_arguments(parser)
        parser.parse_args(words[1:])


def test_files_that_they_name_exist() -> None:
    root = FOLDER.parent
    for name in (*EXECUTED, NOT_RUN):
        for cell in read(name).cells:
            if cell.cell_type == "markdown":
                for target in re.findall(r"\]\(([^)#]+)\)", cell.source):
                    assert (FOLDER / target).exists(), target
            for path in re.findall(r"\b(?:recipes|data_mixtures)/[\w/]+\.\w+", cell.source):
                assert (root / path).exists(), path
    assert Path(FOLDER / "README.md").is_file()
