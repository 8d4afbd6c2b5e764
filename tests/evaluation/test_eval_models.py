"""Models are looked at before anything slow begins."""

import shutil
from pathlib import Path

import pytest

from moh_llm.errors import UserError
from moh_llm.evaluation.models import check_model, describe_model


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_a_whole_model_passes(model: Path) -> None:
    check_model(str(model))


def test_folder_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        check_model(str(model))


def test_folder_without_config(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json does not exist"):
        check_model(str(model))


def test_folder_without_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        check_model(str(model))


def test_truncated_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged or truncated"):
        check_model(str(model))


def test_neither_folder_nor_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    def refuse(name: str) -> None:
        raise OSError(f"{name} is not a local folder\nand a long story")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(UserError, match=r"^out/gone is neither a folder here nor a model on the Hub \(.*folder\)$"):
        check_model("out/gone")


@pytest.mark.parametrize("name", ["./gone", "/gone", "a/b/gone", "here/gone", "gone/"])
def test_mistyped_path_does_not_ask_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"gone/? does not exist"):
        check_model(name)


def test_description_names_heads_and_records(tiny_moh: Path) -> None:
    about = describe_model(str(tiny_moh))
    assert about["model_type"] == "moh_llama"
    assert about["heads"]["num_active_heads"] in (3, [3, 3])
    assert about["records"] == [str(tiny_moh / "conversion.json")]
