"""Tokens without a row in the model's embedding are found before anything is computed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moh_llm.cli import main
from moh_llm.data.shards import open_tokens
from moh_llm.data.tokenizer import TextTokenizer, rows_beside


def add(folder: Path, **special: str) -> None:
    """Add tokens to a folder's tokenizer and no rows to its model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(special or {"additional_special_tokens": ["<|user|>"]})
    tokenizer.save_pretrained(folder)


@pytest.fixture
def base(make_llama: Callable[..., Path], tmp_path: Path) -> Path:
    """A LLaMA whose tokenizer has "<|user|>", id 257, and whose embedding has 257 rows."""
    folder = shutil.copytree(make_llama(), tmp_path / "base")
    add(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Callable[..., Path]:
    """`text(token)`: a file of text that holds the token once."""

    def write(token: str) -> Path:
        lines = [f"{number} the river was high that spring {token if number == 150 else ''}" for number in range(300)]
        (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        return tmp_path / "text.jsonl"

    return write


def tokenize(tokenizer: Path, text: Path, *flags: str) -> int:
    path = text.with_name("m.yaml")
    path.write_text(f"sources: {{a: {{weight: 1, files: {text.name}}}}}")
    return main(["tokenize", str(path), "--tokenizer", str(tokenizer), "--output", str(text.with_name("out")), *flags])


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_convert_and_tokenize_refuse_text_that_holds_one(base, text, convert, tmp_path, capsys, workers):
    path = text("<|user|>")
    shutil.copy(path, path.with_name("text2.jsonl"))
    assert tokenize(base, path.with_name("text*.jsonl"), "--workers", workers) == 2
    assert "'<|user|>' (id 257)" in error_of(capsys)
    if workers == "1":
        # The last --calibration counts.
        more = ["--calibration", str(path), "--calibration-tokens", "6000", "--heldout-tokens", "3000"]
        assert convert(base, tmp_path / "moh", *more) == 2
        assert "'<|user|>' (id 257)" in error_of(capsys) and not (tmp_path / "moh").exists()


def test_text_without_them_is_taken(base, text, tmp_path):
    add(base, pad_token="<pad>")
    assert tokenize(base, text("")) == 0
    tokenizer = TextTokenizer.load(str(base), rows_beside(base))
    assert tokenizer.rows == 257 and open_tokens(tmp_path / "out", tokenizer=tokenizer)
