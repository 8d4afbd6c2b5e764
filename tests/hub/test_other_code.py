"""Code that is not this version's own: shown by its hash, run only where that is allowed."""

import json
import sys
from pathlib import Path

import pytest
import torch

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.files import sha256

CODE = "import pathlib\npathlib.Path({marker!r}).touch()\n"


def _edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _change(folder: Path, how: str, code: str) -> str:
    """Put other code into a folder; returns the file that the error must name."""
    if how == "of the model":
        with (folder / "modeling_moh_llama.py").open("a") as file:
            file.write(f"\n{code}")
        return "modeling_moh_llama.py"
    if how == "new":
        (folder / "helper.py").write_text(code)
        return "helper.py"
    if how == "elsewhere":
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        elsewhere = {"AutoConfig": "someone/model--configuration_moh_llama.MoHLlamaConfig"}
        _edit(folder / "config.json", auto_map=auto_map | elsewhere)
        return "config.json"
    _edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]})
    return "tokenizer_config.json"


@pytest.mark.parametrize("how", ["of the model", "new", "elsewhere", "of the tokenizer"])
def test_other_code_is_refused_before_it_runs(folder, tmp_path, fake_hub, monkeypatch, capsys, how):
    marker = tmp_path / "it ran"
    monkeypatch.setattr("moh_llm.hub.publish.prove", lambda published, local: pytest.fail("it was loaded"))
    name = _change(folder, how, CODE.format(marker=str(marker)))
    assert main(["publish", str(folder), "--repo-id", "org/moh"]) == 2
    error = capsys.readouterr().err
    assert f"{name}: " in error and "not code of moh-llm" in error
    if name.endswith(".py"):
        assert f"{name}: has SHA-256 {sha256(folder / name)[:16]}" in error
    assert not marker.exists() and not fake_hub.requests


@pytest.fixture
def hostile(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose every file of code leaves `tmp_path/it ran`; every question is answered with yes."""
    code = CODE.format(marker=str(tmp_path / "it ran"))
    for path in folder.glob("*.py"):
        path.write_text(code + path.read_text())
    (folder / "tokenization_own.py").write_text(
        f"{code}from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    _edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]})
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"{code}def generate(*args, **kwargs): ...\n")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    for name in _modules_of_folders():  # of other tests in this process
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    return folder


def _ran(tmp_path: Path) -> bool:
    return (tmp_path / "it ran").exists() or bool(_modules_of_folders())


def _modules_of_folders() -> list[str]:
    return [name for name in sys.modules if name.startswith("transformers_modules.")]


@pytest.mark.slow
def test_no_other_command_runs_the_code_of_a_folder(hostile, convert, tmp_path, capsys):
    from moh_llm.data.tokenizer import TextTokenizer
    from moh_llm.evaluation.language_model import load_model
    from moh_llm.evaluation.models import has_heads_off
    from moh_llm.evaluation.processes import Team
    from moh_llm.modeling import MoHLlamaForCausalLM
    from moh_llm.training.networks import load_network, load_tokenizer

    assert convert(hostile, tmp_path / "again") == 0
    assert TextTokenizer.load(str(hostile)) and load_tokenizer(hostile)
    assert type(load_network(hostile, torch.float32)) is MoHLlamaForCausalLM
    assert has_heads_off(str(hostile))
    assert type(load_model(str(hostile), 1, "float32", "cpu", Team()).model) is MoHLlamaForCausalLM
    # Nor where the tokenizer is nothing without its code.
    _edit(hostile / "tokenizer_config.json", tokenizer_class="Own")
    for load in (TextTokenizer.load, load_tokenizer):
        with pytest.raises(UserError, match="contains custom code"):
            load(str(hostile))
    assert convert(hostile, tmp_path / "third") == 2 and "has no tokenizer that loads" in capsys.readouterr().err
    assert not _ran(tmp_path)


def test_an_adapter_in_the_folder_is_reported(folder, capsys):
    from moh_llm.training.networks import load_network

    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    assert main(["publish", str(folder), "--repo-id", "org/moh", "--dry-run"]) == 2
    assert "holds an adapter (adapter_config.json)" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds an adapter"):
        load_network(folder, torch.float32)
