"""Tokens without a row in the model's embedding are found before anything is computed."""

import json
import shutil

from transformers import AutoTokenizer

from moh_llm.cli import main


def test_convert_and_tokenize_refuse_text_that_holds_one(make_llama, convert, tmp_path, capsys):
    base = shutil.copytree(make_llama(), tmp_path / "base")  # its embedding has 257 rows
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"], "pad_token": "<pad>"})
    tokenizer.save_pretrained(base)

    def write(name: str, token: str) -> list[str]:
        lines = [f"{number} the river was high that spring {token if number == 150 else ''}" for number in range(300)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        (tmp_path / f"{name}.yaml").write_text(f"sources: {{a: {{weight: 1, files: {name}.jsonl}}}}")
        mixture, output = tmp_path / f"{name}.yaml", tmp_path / f"out-{name}"
        return ["tokenize", str(mixture), "--tokenizer", str(base), "--output-dir", str(output)]

    assert main(write("without", "")) == 0
    for run in (
        lambda: main(write("with", "<|user|>")),
        lambda: convert(
            base, tmp_path / "moh", "--calibration", f"{tmp_path}/with.jsonl", "--calibration-tokens", "6000"
        ),
    ):
        assert run() == 2
        assert "'<|user|>' (id" in capsys.readouterr().err
    assert not (tmp_path / "moh").exists()
