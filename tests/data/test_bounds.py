"""What reading text may take: memory per document, files looked through, and nothing that is no file."""

import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moh_llm.cli import main
from moh_llm.data import records

zstandard = pytest.importorskip("zstandard")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LIMIT = 4096
SHORT, LONG = "a river", "a river " * LIMIT
ADVICE = "MiB, the most for one document (split it into shorter ones)"


def _lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _parquet(*texts: str, rows: int = 1 << 20) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts), "other": [LONG] * len(texts)}), file, row_group_size=rows)
    return file.getvalue()


# name: content, the record that is too long, how many are good, how many are left out
TOO_LONG = {
    "a.jsonl": (_lines(SHORT, LONG, SHORT), ", line 2", 2, 1),
    "last.jsonl": (_lines(SHORT, LONG).rstrip(b"\n"), ", line 2", 1, 1),
    "a.jsonl.zst": (zstandard.compress(_lines(SHORT, LONG, SHORT)), ", line 2", 2, 1),
    "a.txt": (LONG.encode(), "", 0, 1),
    "a.parquet": (_parquet(*[SHORT] * 20, LONG, *[SHORT] * 20), ", row 21", 40, 1),
    "mean.parquet": (
        _parquet(SHORT, "".join(map(str, range(LIMIT))), SHORT, rows=1),
        ", rows 2 to 2, on average",
        2,
        1,
    ),
    "group.parquet": (_parquet(LONG, LONG + SHORT, SHORT, rows=2), ", rows 1 to 2, on average", 1, 2),
}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORD_BYTES", LIMIT)


@pytest.fixture
def tokenize(tmp_path: Path, byte_tokenizer) -> Callable[..., int]:
    """`moh-llm tokenize` of one source, given as YAML; returns the exit status."""
    byte_tokenizer(tmp_path / "tokenizer")

    def run(source: str, *flags: str) -> int:
        (tmp_path / "mixture.yaml").write_text(f"sources:\n  web: {{weight: 1, {source}}}\n")
        places = ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "out"), "--workers", "1"]
        return main(["tokenize", str(tmp_path / "mixture.yaml"), *places, *flags])

    return run


@pytest.fixture
def refusal(tokenize: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line of a `tokenize` that fails."""

    def run(source: str, *flags: str) -> str:
        assert tokenize(source, *flags) == 2
        told = capsys.readouterr().err
        errors = [line for line in told.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "Traceback" not in told
        return errors[0].removeprefix("error: ")

    return run


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_document_that_is_too_long_is_reported_or_left_out(tmp_path, limit, tokenize, refusal, name):
    content, where, good, bad = TOO_LONG[name]
    (tmp_path / name).write_bytes(content)
    told = refusal(f"files: {name}")
    assert told.startswith(f"{tmp_path / name}{where}: longer than 0.003906 ") and ADVICE in told
    if not good:
        assert refusal(f"files: {name}", "--on-bad-record", "skip").endswith("(0 records were filtered out, 1 bad)")
        return
    assert tokenize(f"files: {name}", "--on-bad-record", "skip") == 0
    record = json.loads((tmp_path / "out" / "mixture.json").read_text())["sources"]["web"]
    assert (record["documents"], record["bad"], len(record["bad_examples"])) == (good, bad, 1)
    assert record["bad_examples"][0].startswith(f"{tmp_path / name}{where}: longer than ")


def test_documents_up_to_the_limit_are_read(tmp_path, limit, tokenize):
    text = "é" * (LIMIT // 2 - len('{"text": ""}\n') // 2 - 1)
    line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    line += " " * (LIMIT - len(line.encode())) + "\n"  # a blank line fills it up to no record
    (tmp_path / "a.jsonl").write_text(line * 3)
    (tmp_path / "a.txt").write_text("b" * LIMIT)
    (tmp_path / "a.parquet").write_bytes(_parquet(*["c" * (LIMIT - 64)] * 40))
    for name, documents in (("a.jsonl", 3), ("a.txt", 1), ("a.parquet", 40)):
        assert tokenize(f"files: {name}", "--overwrite") == 0
        record = json.loads((tmp_path / "out" / "mixture.json").read_text())["sources"]["web"]
        assert (record["documents"], record["bad"]) == (documents, 0)


_READ = """
import resource, sys
from moh_llm.data.locate import SourceFile
from moh_llm.data.mixture import Source
from moh_llm.data.records import source_documents
from moh_llm.errors import UserError
import pyarrow
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (160 << 20),) * 2)
for name in sys.argv[1:]:
    try:
        print(list(source_documents(Source("web", 1.0), [SourceFile(name)])))
    except UserError as error:
        print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells how much memory there is")
def test_memory_stays_bounded(tmp_path):
    zeros = bytes(16 << 20)
    for name in ("a.jsonl.gz", "a.txt.gz"):  # a GiB of zeros
        (tmp_path / name).write_bytes(gzip.compress(zeros, 1) * 64)
    for name in ("a.jsonl.zst", "a.txt.zst"):
        with (tmp_path / name).open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
            for _ in range(20):
                writer.write(zeros)
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(1 << 30)  # sparse
    names = sorted(str(path) for path in tmp_path.iterdir())
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the default reserves address space
    done = subprocess.run([sys.executable, "-c", _READ, *names], capture_output=True, text=True, env=environment)
    told = done.stdout.splitlines()
    assert done.returncode == 0 and len(told) == len(names) == 5, done.stderr
    for name, line in zip(names, told, strict=True):
        assert line.startswith(name) and f": longer than 16 {ADVICE}" in line


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A pipe in `tmp_path/text`; whoever opens it is woken up after some seconds, and fails."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(_lines(SHORT))
    os.mkfifo(tmp_path / "text" / "b.jsonl")

    def fail(*args: object) -> None:
        raise AssertionError("it waits for the pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield tmp_path / "text" / "b.jsonl"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_pipes_and_devices_are_not_read(pipe, tokenize, refusal):
    assert tokenize("files: text/*.jsonl") == 0  # the file beside it
    assert refusal("files: text/b.jsonl") == f"source web: no file at {pipe}"
    assert f"{pipe} is no regular file" in refusal(f"urls: 'file://{pipe}'", "--overwrite")
    assert f"{pipe} is no regular file" in refusal("url_list: text/b.jsonl")
    assert "/dev/zero is no regular file" in refusal("urls: 'file:///dev/zero', format: text", "--overwrite")


def test_what_the_disk_refuses_is_reported(tmp_path, tokenize, refusal):
    (tmp_path / "a.jsonl").write_bytes(_lines(*[f"{i} {SHORT}" for i in range(4000)]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        told = refusal("files: a.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert told.startswith("cannot write ") and "File too large; free some space" in told
    assert tokenize("files: a.jsonl") == 0
