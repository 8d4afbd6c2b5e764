"""Filters that leave records out unasked: what no record meets is named, wherever text is read to its end."""

import json
from pathlib import Path

import pytest

from moh_llm.cli import main
from moh_llm.data.locate import SourceFile
from moh_llm.data.mixture import Source, load_mixture
from moh_llm.data.records import source_documents
from moh_llm.data.sample import sample_mixture
from moh_llm.errors import UserError

RECORDS = [{"text": f"{i} " + "a river " * 40, "code": f"{i % 2:02}", "lang": "en", "size": i} for i in range(40)]


@pytest.fixture
def mixture(tmp_path: Path, byte_tokenizer, monkeypatch):
    """`mixture(filters)`: the path of a mixture of two files."""
    byte_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setattr("moh_llm.data.tasks._TASK_BYTES", 1000)
    for number in range(2):
        lines = [json.dumps(record) + "\n" for record in RECORDS[number::2]]
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))

    def make(filters: str) -> Path:
        path = tmp_path / "m.yaml"
        path.write_text(f"sources: {{web: {{weight: 1, files: '*.jsonl', filters: {filters}}}}}")
        return path

    return make


# Filters, what is said of each part that no record meets, and whether records are left.
UNMET = [
    ("{lang: [en, de]}", ["lang: de"], True),
    ("{code: ['00', 01]}", ["code: 1: this is a number, and the field holds a text; put it in quotes"], True),
    ("{code: 00}", ["code: 0: this is a number, and the field holds a text; put it in quotes"], False),
    ("{lang: [en, true]}", ["lang: true: this is true or false, and the field holds a text"], True),
    ("{size: ['1', 2, 99]}", ["size: 1: this is a text, and the field holds a number", "size: 99"], True),
    ("{code: {min: 1}}", ["code: {min: 1}: this is a number, and the field holds a text"], False),
    ("{langs: en}", ["langs: en, since none has a value of langs"], False),
    ("{lang: [en], size: {max: 5}}", [], True),
]


@pytest.mark.parametrize(("filters", "lines", "left"), UNMET)
@pytest.mark.parametrize("how", ["tokenize", "sample"])
def test_what_no_record_meets_is_named(mixture, tmp_path, capsys, monkeypatch, filters, lines, left, how):
    monkeypatch.setattr("moh_llm.data.notes._said", set())
    path = mixture(filters)
    if how == "tokenize":
        command = ["tokenize", str(path), "--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "out")]
        assert main(command) == (0 if left else 2)
        said = capsys.readouterr().err
    else:
        from transformers import AutoTokenizer

        tokenizer, error = AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), ""
        try:
            sample_mixture(load_mixture(path), tokenizer)
        except UserError as refused:
            error = str(refused)
        assert bool(error) != left
        said = capsys.readouterr().err + error
    found = [line for line in said.splitlines() if "no record meets" in line]
    assert len(found) == len(lines) and all(part in line for part, line in zip(lines, found, strict=True))


def test_a_filter_of_plain_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a river")
    source = Source("web", 1.0, filters={"lang": "en"})
    with pytest.raises(UserError, match="filters need JSON lines or parquet"):
        list(source_documents(source, [SourceFile(f"{tmp_path}/a.txt")]))


@pytest.mark.parametrize(
    ("accepted", "kept"),
    [
        ("true", [True]),
        ("false", [False]),
        ("1", [1, 1.0]),
        ("[0, true]", [0, True]),
        ("{min: 0.5}", [1, 1.0]),
        ("{max: 0.5}", [0]),
    ],
)
def test_true_and_false_are_no_numbers(tmp_path, accepted, kept):
    values = [0, 1, 1.0, False, True, "1", None]
    lines = [json.dumps({"text": json.dumps(value), "n": value}) + "\n" for value in values]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "m.yaml").write_text(f"sources: {{web: {{weight: 1, files: a.jsonl, filters: {{n: {accepted}}}}}}}")
    (source,) = load_mixture(tmp_path / "m.yaml").sources
    found = [text for _, text in source_documents(source, [SourceFile(f"{tmp_path}/a.jsonl")])]
    assert found == [json.dumps(value) for value in kept]


def test_shards_of_a_number_are_not_those_of_true(mixture, tmp_path, capsys):
    command = ["tokenize", str(tmp_path / "m.yaml"), "--tokenizer", str(tmp_path / "tokenizer")]
    command += ["--output", str(tmp_path / "out")]
    mixture("{size: [1, 2]}")
    assert main(command) == 0
    mixture("{size: [true, 2]}")
    assert main(command) == 2 and "filters was" in capsys.readouterr().err
