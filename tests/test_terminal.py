"""What commands print: names as they are, whatever characters are in them, and in any locale."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import moh_llm
from moh_llm.cli import main
from moh_llm.errors import UserError, in_unicode, printable
from moh_llm.files import write_json, write_text
from moh_llm.reading import read_json
from moh_llm.records.base import Record
from moh_llm.terminal import say

PACKAGE = Path(moh_llm.__file__).parent
LATIN = os.fsdecode(b"caf\xe9")  # a name that is not UTF-8
PLAIN = ["--preset", "paper", "--heldout-tokens", "0"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("out/[v1]/é :smile: 模型", "out/[v1]/é :smile: 模型"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\nb\rc\td\0", r"a\nb\rc\td\x00"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("gpj.\u202etxt\u2066", r"gpj.\u202etxt\u2066"),
        (LATIN, "caf%E9"),
        ("\ud800", r"\ud800"),
    ],
)
def test_what_is_no_text_of_one_line_is_shown_as_an_escape(text, shown, capsys):
    assert printable(text) == shown and str(UserError(text)) == shown
    say(text, "next")
    assert capsys.readouterr().out == f"{shown}\nnext\n"


def test_only_one_module_prints():
    """The others go through it, so that none shows a name by `print` or as rich's markup."""
    for path in PACKAGE.rglob("*.py"):
        if path.name in ("terminal.py", "launch.py"):  # the second prints names of signals alone
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called not in ("print", "Console"), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "no\x1b[31m\nsuch/a/b", "--output", "out"],
        ["mixture", "show", "no\rsuch\u202e.yaml"],
    ],
)
def test_an_error_is_one_line_of_text(command, capsys):
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "error: " in told.splitlines()[-1] and all(line == printable(line) for line in told.splitlines())
    assert told.splitlines()[-1].count("\\") >= 1


# ---- names that are not UTF-8, and locales that are not


def test_records_hold_the_bytes_of_a_name_as_escapes(tmp_path):
    class Text(Record):
        file: str
        shares: dict[str, float]

    record = Text(file=f"/a/{LATIN}", shares={LATIN: 1.0})
    record.write(tmp_path / "record.json")
    assert Text.read(tmp_path / "record.json").content() == {"file": "/a/caf%E9", "shares": {"caf%E9": 1.0}}
    write_json(tmp_path / "recipe.json", {"model": LATIN})  # which is to be found again
    write_text(tmp_path / "ascii.json", json.dumps({"model": LATIN}, ensure_ascii=False))
    assert read_json(tmp_path / "recipe.json") == read_json(tmp_path / "ascii.json") == {"model": LATIN}
    assert in_unicode("é") == "é"


def test_a_mixtures_pattern_finds_such_a_file(make_llama, river, tmp_path, capsys):
    (tmp_path / f"{LATIN}.jsonl").write_bytes(river.read_bytes())
    (tmp_path / "m.yaml").write_text(yaml.safe_dump({"sources": {"a": {"weight": 1, "files": "*.jsonl"}}}))
    command = ["tokenize", str(tmp_path / "m.yaml"), "--tokenizer", str(make_llama()), "--output"]
    assert main([*command, str(tmp_path / "tokens")]) == 0
    assert "caf%E9.jsonl" in (tmp_path / "tokens" / "mixture.json").read_text(encoding="utf-8")
    assert main([*command, str(tmp_path / "tokens")]) == 0  # it is the same text


@pytest.mark.slow
@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}]
)
def test_names_are_found_and_printed_in_any_locale(locale, river, tmp_path):
    (tmp_path / "té.jsonl").write_bytes(river.read_bytes())
    content = {"name": "é", "sources": {"à": {"weight": 1, "files": "té.jsonl"}}}
    (tmp_path / "mö.yaml").write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))
    }
    environment |= locale | {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-m", "moh_llm.cli", "mixture", "show", "mö.yaml", "--tokens", "1M"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert ("à" if "LC_ALL" in locale else r"\xe0").encode() in done.stdout
