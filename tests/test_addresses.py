"""No message and no record holds the password of an address, wherever it was given."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from moh_llm import cli
from moh_llm.errors import UserError, without_passwords
from moh_llm.files import write_json

WITH = "https://alice:hidden@host"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("https://alice:hidden@host:8/a.jsonl?x=1", "https://host:8/a.jsonl?x=1"),
        ("s3://key:hid@den@bucket/a", "s3://bucket/a"),
        ("ftp://alice:hid'\"den@host", "ftp://host"),
        ("https://alice:hid#den?@host/a", "https://host/a"),
        ("http://alice:hidden@[::1/x", "http://[::1/x"),
        ("{'a': 'https://alice:hidden@host/', 'b': 'ftp://x:hidden@y'}", "{'a': 'https://host/', 'b': 'ftp://y'}"),
        ("hf://datasets/org/name@v2/a", "hf://datasets/org/name@v2/a"),
        ("https://host:8080/x, or mail me@host", "https://host:8080/x, or mail me@host"),
    ],
)
def test_passwords_are_taken_out_and_nothing_else(text, wanted):
    assert without_passwords(text) == wanted
    assert str(UserError(f"what of {text}")) == f"what of {wanted}"


def test_records_hold_none(tmp_path):
    record = {"a": [f"{WITH}/b", 3], f"{WITH}/c": {"d": "me@host", "e": f"see {WITH}/f, twice"}, "g": None}
    write_json(tmp_path / "record.json", record)
    assert json.loads((tmp_path / "record.json").read_text()) == {
        "a": ["https://host/b", 3],
        "https://host/c": {"d": "me@host", "e": "see https://host/f, twice"},
        "g": None,
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, byte_tokenizer) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return str(folder)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The line of a command that fails; nothing that it prints holds the password."""
    assert cli.main(list(map(str, arguments))) == 2
    told = capsys.readouterr()
    assert "hidden" not in told.out + told.err
    errors = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in told.err
    return errors[0]


@pytest.mark.parametrize(
    "source", [f"{{weight: 1, files: a.txt, '{WITH}/a': 1}}", "{weight: 1, url_list: 'http://alice@[::1/x?key=hidden'}"]
)
def test_nor_what_is_said_of_a_mixture(tmp_path, tokenizer, capsys, source):
    (tmp_path / "mixture.yaml").write_text(f"sources:\n  '{WITH}/name': {source}\n")
    refusal(capsys, "tokenize", tmp_path / "mixture.yaml", "--tokenizer", tokenizer, "--output-dir", tmp_path / "out")


@pytest.mark.parametrize(
    "words",
    [
        ["convert", WITH, "--output-dir", "out"],
        ["mixture", "show", "embedded", "--tokens", WITH],
        ["publish", WITH, "--repo-id", "org/moh"],
        ["evaluate", WITH, "--output-dir", "out"],
        ["train", f"{WITH}/recipe.yaml"],
    ],
)
def test_nor_what_is_said_of_an_argument(capsys, words):
    refusal(capsys, *words)


def test_nor_the_usage_nor_the_traceback_of_a_bug(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        cli.main(["mixture", "show", "embedded", WITH])
    assert "unrecognized arguments: https://host" in (told := capsys.readouterr().err) and "hidden" not in told

    def fail(args: object) -> int:
        raise RuntimeError(f"no answer from {WITH}") from ValueError(WITH)

    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setattr("sys.argv", ["moh-llm", "mixture", "show", "embedded"])
    monkeypatch.setattr("moh_llm.commands.mixture.run", fail)
    with pytest.raises(RuntimeError) as bug:
        cli.main()
    __import__("sys").excepthook(bug.type, bug.value, bug.tb)
    told = capsys.readouterr().err
    assert "RuntimeError: no answer from https://host" in told and "in fail" in told and "hidden" not in told


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A server of `tmp_path/site`; its address without the scheme."""
    pytest.importorskip("aiohttp")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    (tmp_path / "site").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "site")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_nor_what_tokenising_leaves_behind(tmp_path, site, tokenizer, capsys):
    text = tmp_path / "site" / "a.jsonl"
    text.write_text(f'{{"text": "river", "url": "{WITH}/a"}}\nno record\n')
    (tmp_path / "list.txt").write_text(f"http://alice:hidden@{site}/a.jsonl?key=hidden\n")
    (tmp_path / "mixture.yaml").write_text(
        f"name: {WITH}\nsources:\n  web:\n    weight: 1\n    url_list: list.txt\n    match: http://alice:hidden@*\n"
    )
    command = ["tokenize", tmp_path / "mixture.yaml", "--tokenizer", tokenizer, "--output-dir", tmp_path / "out"]
    assert refusal(capsys, *command).startswith(f"error: http://{site}/a.jsonl, line 2: not a JSON record")
    text.write_text('{"text": "river"}\n')
    for _ in range(2):  # the second finds its source as it was recorded
        assert cli.main([*map(str, command)]) == 0
        told = capsys.readouterr()
        assert "hidden" not in told.out + told.err
    left = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(left) > 4 and not any(b"hidden" in path.read_bytes() for path in left)
