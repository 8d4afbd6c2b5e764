"""Which documents benchmarks read."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import held_out

TEXTS = ["def one(): pass", "the river was high", "def two(): pass", "河水在那个春天很高", "def three(): pass"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], [0, 1, 2, 3, 4]),
        (["--documents", "2"], [0, 1]),
        (["--documents", "2", "--last"], [3, 4]),
    ],
)
def test_documents_are_chosen(words, wanted, byte_tokenizer, tmp_path):
    byte_tokenizer(tmp_path)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    parser = argparse.ArgumentParser()
    held_out.add_arguments(parser)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    name = str(tmp_path / "text.jsonl")
    (batches,) = held_out.read_texts([name], parser.parse_args(words), tokenizer, 3, 4).values()
    read = tokenizer.decode(np.concatenate([batch["input_ids"].flatten() for batch in batches])).split("<end>")
    expected = [TEXTS[number] for number in wanted]
    assert read[:-1] == expected[: len(read) - 1] and len(read) >= len(expected)
    assert expected[-1].startswith(read[-1]) or not read[-1]  # windows leave out the end
