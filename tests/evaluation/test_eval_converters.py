"""The original files of converted datasets become the rows that lm-eval's tasks read; odd files are refused."""

import json
import zipfile
from pathlib import Path

import pytest

from moh_llm.errors import UserError
from moh_llm.evaluation import converters

ITEM = """
b
All rivers run to the sea.The Elbe is a river.
Which follows? The share is 3.5 %.
A.The Elbe runs uphill
B.The Elbe runs to the sea.
C.No river runs
D.The sea is a river
"""
LOGIQA = f"{ITEM}{ITEM}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ITEM + ITEM.replace("D.The sea is a river\n", ""), "item 2 is not a label"),
        (LOGIQA.replace("\nb\n", "\ne\n"), "item 1 is not a label"),
    ],
)
def test_odd_logiqa_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "Test.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        converters.convert_logiqa(tmp_path / "Test.txt", "logiqa", "test")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("test/arts.csv", ",Question,A,B,C,D\n0,q,a,b,c,d\n", "row 1 lacks one of Question"),
        ("test/arts.csv", ",Question,A,B,C,D,Answer\n0,q,a,b,c,d,E\n", "row 1 lacks .* an answer from A to D"),
        ("test/art.csv", "", "holds 0 files test/arts.csv"),
    ],
)
def test_odd_cmmlu_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / "cmmlu.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, text)
    with pytest.raises(UserError, match=message):
        converters.convert_cmmlu(file, "arts", "test")
    file.write_text("no zip")
    with pytest.raises(UserError, match="cannot be read as a zip"):
        converters.convert_cmmlu(file, "arts", "test")


def test_converted_logiqa_is_what_others_made_of_it(shared_benchmarks: Path, tmp_path: Path) -> None:
    """Real rows, turned back into the original's lines and converted anew."""
    held = (shared_benchmarks / "EleutherAI__logiqa" / "logiqa" / "test.jsonl").read_text(encoding="utf-8")
    theirs = [json.loads(line) for line in held.splitlines()]
    blocks = []
    for row in theirs:
        passage, question = (row[key].replace(". ", ".") for key in ("context", "question"))
        options = [f"{letter}.{text.replace('. ', '.')}" for letter, text in zip("ABCD", row["options"], strict=True)]
        blocks.append("\n".join([row["label"], passage, question, *options]))
    (tmp_path / "Test.txt").write_text("\n" + "\n\n".join(blocks) + "\n", encoding="utf-8")
    assert converters.convert_logiqa(tmp_path / "Test.txt", "logiqa", "test") == theirs
