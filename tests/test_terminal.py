"""What commands print: names as they are, whatever characters are in them."""

import ast
import os
from pathlib import Path

import pytest
import yaml

import moh_llm
from moh_llm.cli import main
from moh_llm.errors import UserError, printable
from moh_llm.terminal import say

PACKAGE = Path(moh_llm.__file__).parent
LATIN = os.fsdecode(b"caf\xe9")  # a name that is not UTF-8


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("out/[v1]/é :smile: 模型", "out/[v1]/é :smile: 模型"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb\rc\td\0", r"a\nb\rc\td\x00"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("gpj.\u202etxt\u2066", r"gpj.\u202etxt\u2066"),
        (LATIN, r"caf\udce9"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_is_no_text_of_one_line_is_shown_as_an_escape(text, shown, capsys):
    assert printable(text) == shown and str(UserError(text)) == shown
    say(text, "next")
    assert capsys.readouterr().out == f"{shown}\nnext\n"


def test_only_one_module_prints():
    """The others go through it, so that none shows a name as it is."""
    for path in PACKAGE.rglob("*.py"):
        if path.name in ("terminal.py", "launch.py"):  # the second prints names of signals alone
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called not in ("print", "Console"), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    "command",
    [["convert", "no\x1b[31m\nsuch/a/b", "--output-dir", "out"], ["mixture", "show", "no\rsuch\u202e.yaml"]],
)
def test_an_error_is_one_line_of_text(command, capsys):
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "error: " in told.splitlines()[-1] and all(line == printable(line) for line in told.splitlines())
    assert told.splitlines()[-1].count("\\") >= 1


def test_a_file_whose_name_is_not_utf_8_is_refused(make_llama, river, tmp_path, capsys):
    (tmp_path / f"{LATIN}.jsonl").write_bytes(river.read_bytes())
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({"sources": {"a": {"weight": 1, "files": "*.jsonl"}}}))
    for command in (
        ["tokenize", str(tmp_path / "m.yaml"), "--tokenizer", str(make_llama()), "--output-dir", str(tmp_path / "out")],
        ["convert", str(tmp_path / LATIN), "--output-dir", str(tmp_path / "out")],
    ):
        assert main(command) == 2
        assert "in UTF-8" in capsys.readouterr().err
