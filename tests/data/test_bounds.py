"""What reading text may take: memory per document, files looked through, and nothing that is no file."""

import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moh_llm.data import records
from moh_llm.data.locate import SourceFile, locate
from moh_llm.data.mixture import Source, mixture_from_files
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError

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
    "a.jsonl.zst": (zstandard.compress(_lines(SHORT, LONG, SHORT)), ", line 2", 2, 1),
    "a.parquet": (_parquet(*[SHORT] * 20, LONG, *[SHORT] * 20), ", row 21", 40, 1),
    "group.parquet": (_parquet(LONG, LONG + SHORT, SHORT, rows=2), ", rows 1 to 2, on average", 1, 2),
}


def read(path: Path, skip_bad: bool = False) -> records.Reading:
    reading = records.Reading(skip_bad)
    list(records.source_documents(Source("web", 1.0), [SourceFile(str(path))], reading))
    return reading


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_document_that_is_too_long_is_reported_or_left_out(tmp_path, monkeypatch, name):
    monkeypatch.setattr(records, "RECORD_BYTES", LIMIT)
    content, where, good, bad = TOO_LONG[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    told = f"{tmp_path / name}{where}: longer than 0.003906 {ADVICE}"
    assert str(error.value).startswith(told)
    reading = read(tmp_path / name, skip_bad=True)
    assert (reading.documents, reading.bad, reading.examples) == (good, bad, [told])


def test_documents_up_to_the_limit_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RECORD_BYTES", LIMIT)
    text = "é" * (LIMIT // 2 - len('{"text": ""}\n') // 2 - 1)
    line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    line += " " * (LIMIT - len(line.encode())) + "\n"  # a blank line fills it up to no record
    (tmp_path / "a.jsonl").write_text(line * 3)
    (tmp_path / "a.txt").write_text("b" * LIMIT)
    (tmp_path / "a.parquet").write_bytes(_parquet(*["c" * (LIMIT - 64)] * 40))
    assert [read(tmp_path / name).documents for name in ("a.jsonl", "a.txt", "a.parquet")] == [3, 1, 40]


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
    """A pipe; whoever opens it is woken up after some seconds, and fails."""
    os.mkfifo(tmp_path / "b.jsonl")

    def fail(*args: object) -> None:
        raise AssertionError("it waits for the pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield tmp_path / "b.jsonl"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_pipes_and_devices_are_not_read(pipe, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_lines(SHORT))
    assert [file.path for file in locate(Source("web", 1.0, (f"{tmp_path}/*.jsonl",)))] == [f"{tmp_path}/a.jsonl"]
    for refused in (pipe, "/dev/zero"):
        for source in (
            Source("web", 1.0, (str(refused),)),
            Source("web", 1.0, urls=(f"file://{refused}",), format="text"),
            Source("web", 1.0, url_list=str(refused)),
        ):
            with pytest.raises(UserError, match=f"no file at {refused}|{refused} is no regular file"):
                list(records.source_documents(source))


def test_what_the_disk_refuses_is_reported(tmp_path, byte_tokenizer):
    (tmp_path / "a.jsonl").write_bytes(_lines(*[f"{i} {SHORT}" for i in range(4000)]))
    byte_tokenizer(tmp_path / "tokenizer")
    tokenizer, mixture = TextTokenizer.load(str(tmp_path / "tokenizer")), mixture_from_files([f"{tmp_path}/a.jsonl"])
    mixture = replace(mixture, sources=(replace(mixture.sources[0], name="a"),))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"^cannot write .*File too large; free some space"):
            tokenize_mixture(mixture, tokenizer, tmp_path / "out", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert tokenize_mixture(mixture, tokenizer, tmp_path / "out", workers=1).tokens > 30_000
