"""Typed records: what is read is what was written, and a file that is something else gives one line."""

import json

import pytest
from pydantic import Field

from moh_llm.errors import UserError
from moh_llm.records.base import Record


class Score(Record):
    """A record of each kind of field."""

    step: int = Field(ge=1)
    loss: float
    files: dict[str, str] = Field(default_factory=dict)
    note: str | None = None


def test_written_and_read_again(tmp_path):
    path = tmp_path / "score.json"
    score = Score(step=2, loss=0.5, files={"a": "b"})
    score.write(path)
    assert json.loads(path.read_text()) == {"step": 2, "loss": 0.5, "files": {"a": "b"}}  # what was not set is left out
    assert Score.read(path) == score
    assert [file.name for file in tmp_path.iterdir()] == ["score.json"]


def test_unknown_fields_are_kept(tmp_path):
    path = tmp_path / "score.json"
    content = {"step": 2, "loss": 1, "of_a_later_version": {"x": [1, None]}}
    path.write_text(json.dumps(content))
    Score.read(path).write(path)
    assert json.loads(path.read_text()) == content


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{}", "lacks step"),
        ('{"step": "1", "loss": 1}', "has step = '1': Input should be a valid integer"),
        ('{"step": 1, "loss": NaN}', "has loss = nan: Input should be a finite number"),
        ('{"step": 1, "loss": 1, "files": {"a": 3}}', "has files.a = 3: Input should be a valid string"),
        ("{", "cannot be read as JSON: "),
        ('{"step":' * 100_000, "nested too deep"),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path, content, fault):
    path = tmp_path / "score.json"
    path.write_text(content)
    with pytest.raises(UserError) as refusal:
        Score.read(path)
    line = str(refusal.value)
    assert line.startswith(str(path)) and fault in line and "\n" not in line


def test_a_value_is_cut_and_shows_no_password():
    with pytest.raises(UserError) as refusal:
        Score.parse({"step": "https://" + "me:hunter22@example.org/" + "x" * 10_000, "loss": 1}, "it")
    line = str(refusal.value)
    assert line.startswith("it has step = ") and "example.org" in line and "hunter22" not in line and len(line) < 200
