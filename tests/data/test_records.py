"""Documents out of files of every format, in bounded memory; every fault stops with file and record."""

import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moh_llm.data import records
from moh_llm.data.locate import SourceFile, locate
from moh_llm.data.mixture import Source, mixture_from_files
from moh_llm.data.records import source_documents
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError

zstandard = pytest.importorskip("zstandard")
pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

DOCUMENTS = [f"документ {i}: " + "letters and more letters " * (i % 7 + 1) for i in range(200)]
LIMIT = 4096
SHORT, LONG = "a river", "a river " * LIMIT
ADVICE = "MiB, the most for one document (split it into shorter ones)"


def lines(texts: Sequence[str] = DOCUMENTS, field: str = "text") -> bytes:
    records = [{"id": i, field: text} for i, text in enumerate(texts)]
    return "".join(json.dumps(record, ensure_ascii=i % 2 == 0) + "\n" for i, record in enumerate(records)).encode()


def parquet(columns: dict[str, list], rows: int = 1 << 20) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=rows)
    return file.getvalue()


def frames(data: bytes, sizes: Sequence[int]) -> bytes:
    """Zstandard frames of these sizes and one of the rest; some with a checksum, one without content."""
    parts, at = [], 0
    for number, size in enumerate([*sizes, len(data)]):
        packer = zstandard.ZstdCompressor(write_checksum=number % 2 == 0, write_content_size=number % 3 == 0)
        parts.append(packer.compress(data[at : at + size]))
        at += size
    return b"".join(parts)


LINES = lines()
GZIP, ZSTD = gzip.compress(LINES), zstandard.ZstdCompressor(write_checksum=True).compress(LINES)
PARQUET = parquet({"text": DOCUMENTS}, rows=50)
ONE, TWO = b'{"text": "1"}\n', b'{"text": "2"}\n'


def read(path: Path, **source) -> list[str]:
    return [text for _, text in source_documents(Source("web", 1.0, **source), [SourceFile(str(path))])]


def refusal(path: Path, **source) -> str:
    with pytest.raises(UserError) as error:
        read(path, **source)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


FILES = [
    ("a.jsonl", LINES.replace(b"\n", b"\r\n\r\n"), DOCUMENTS),
    ("a.jsonl.gz", gzip.compress(LINES[:999]) + gzip.compress(b"") + gzip.compress(LINES[999:]), DOCUMENTS),
    ("a.ndjson.zstd", zstandard.compress(b"\xef\xbb\xbf" + LINES), DOCUMENTS),
    ("a.jsonl.zst", frames(LINES, [1000, 0, 1, 5000, 3000]), DOCUMENTS),
    # What pzstd writes: skippable frames before the others.
    ("a.jsonl.zst", b"\x50\x2a\x4d\x18\x04\0\0\0pzst" + ZSTD + b"\x5f\x2a\x4d\x18\0\0\0\0", DOCUMENTS),
    ("a.parquet", parquet({"id": list(range(200)), "text": DOCUMENTS}, rows=70), DOCUMENTS),
    ("a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\rthree", ["one\n\ntwo\rthree"]),
    ("a.md.gz", gzip.compress(b"# heading"), ["# heading"]),
    ("a.jsonl", b'\n{"text": ""}\n  \n{"text": " \\n\\t"}\n{"text": " x "}\n\n', [" x "]),
]


@pytest.mark.parametrize(("name", "data", "documents"), FILES, ids=[file[0] for file in FILES])
def test_formats(tmp_path, name, data, documents):
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == documents


def test_the_text_is_in_the_field_that_the_source_names(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    (tmp_path / "a.parquet").write_bytes(parquet({"text": ["no"], "body": ["yes"]}))
    assert read(tmp_path / "a.jsonl", text_field="body") == read(tmp_path / "a.parquet", text_field="body") == ["yes"]


FAULTS = [
    ("a.jsonl", ONE + b'{"text": \n' + TWO, ", line 2: not a JSON record"),
    ("a.jsonl", ONE + b"[" * 100_000 + b"\n" + TWO, ", line 2: not a JSON record"),
    ("a.jsonl", ONE + b'"text"\n', ", line 2: expected a JSON object, found str"),
    ("a.jsonl", ONE + b'{"id": 1, "x": ""}\n' + TWO, ", line 2: no text in the field text; the record has id, x; text"),
    ("a.jsonl", ONE + b'{"text": 5}\n' + TWO, ", line 2: no text in the field text, which holds 5; the record"),
    ("a.jsonl", ONE + b'{"text": "\xc3\xa4\xff"}\n' + TWO, ", line 2: not a JSON record ('utf-8' codec can't dec"),
    (
        "a.parquet",
        parquet({"text": ["1", None, "2"]}),
        ", row 2: no text in the field text, which holds null; the record has text",
    ),
    ("a.parquet", parquet({"body": ["1"]}), " cannot be read past record 0: no column text in body"),
    ("a.txt", b"ab\xff", ": 'utf-8' codec can't decode byte 0xff in position 2"),
    ("a.jsonl.zst", b"", " is empty"),
    ("a.jsonl.gz", b"not gzip", " cannot be read past record 0: Not a gzipped file"),
    ("a.jsonl.gz", GZIP[:-8] + bytes(4) + GZIP[-4:], " cannot be read past record "),
    ("a.jsonl.zst", ZSTD + b"and more", " cannot be read past record "),
    *(("a.parquet", data, " cannot be read past record 0: ") for data in (b"", PARQUET[:-1])),
    ("a.parquet", PARQUET.replace(PARQUET[2000:2200], bytes(200)), " cannot be read past record "),
    ("a.csv.gz", b"", ": unknown ending; known are .jsonl, .json, .ndjson, .parquet, .txt, .md"),
]


@pytest.mark.parametrize(("name", "data", "message"), FAULTS, ids=[fault[0] + fault[2] for fault in FAULTS])
def test_a_fault_stops(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    assert refusal(tmp_path / name).startswith(f"{tmp_path / name}{message}")


@pytest.mark.parametrize("cut", [11, -200, -4])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_truncated(tmp_path, name, cut):
    data = GZIP if name.endswith("gz") else ZSTD
    for content in (data[:cut], data + data[:cut]):  # the latter behind a whole stream
        (tmp_path / name).write_bytes(content)
        assert " cannot be read past record " in refusal(tmp_path / name)


def test_truncated_behind_whole_lines(tmp_path):
    packers = zstandard.ZstdCompressor().compressobj(), zlib.compressobj(wbits=31)
    ends = zstandard.COMPRESSOBJ_FLUSH_BLOCK, zlib.Z_SYNC_FLUSH
    zst, gz = (packer.compress(LINES) + packer.flush(end) for packer, end in zip(packers, ends, strict=True))
    with zstandard.ZstdDecompressor().stream_reader(zst) as stream:
        assert stream.read() == LINES  # the library itself says nothing
    for name, data in {"a.jsonl.zst": zst, "b.jsonl.zst": ZSTD + zst, "a.jsonl.gz": gz}.items():
        (tmp_path / name).write_bytes(data)
        assert " cannot be read past record " in refusal(tmp_path / name)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name, data in {"a.jsonl.zst": ZSTD, "a.parquet": PARQUET}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=r'needs pyarrow; pip install "moh-llm\[data\]"$'):
            read(tmp_path / name)


# name: content, the record that is too long
TOO_LONG = {
    "a.jsonl": (lines([SHORT, LONG, SHORT]), ", line 2"),
    "a.jsonl.zst": (zstandard.compress(lines([SHORT, LONG, SHORT])), ", line 2"),
    "a.parquet": (parquet({"text": [*[SHORT] * 20, LONG, SHORT], "other": [LONG] * 22}), ", row 21"),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_document_that_is_too_long_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(records, "RECORD_BYTES", LIMIT)
    content, where = TOO_LONG[name]
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path / name).startswith(f"{tmp_path / name}{where}: longer than 0.003906 {ADVICE}")


def test_documents_up_to_the_limit_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RECORD_BYTES", LIMIT)
    line = json.dumps({"text": "é" * (LIMIT // 2 - len('{"text": ""}\n') // 2 - 1)}, ensure_ascii=False) + "\n"
    (tmp_path / "a.jsonl").write_text((line + " " * (LIMIT - len(line.encode())) + "\n") * 3)
    (tmp_path / "a.txt").write_text("b" * LIMIT)
    (tmp_path / "a.parquet").write_bytes(parquet({"text": ["c" * (LIMIT - 64)] * 40}))
    assert [len(read(tmp_path / name)) for name in ("a.jsonl", "a.txt", "a.parquet")] == [3, 1, 40]
    # Of a column of categories a row has one, although all of them are longer than a record may be.
    texts = [letter * (LIMIT - 64) for letter in "abc"]
    (tmp_path / "a.parquet").write_bytes(parquet({"text": pa.array([*texts, *texts[::-1]]).dictionary_encode()}))
    assert read(tmp_path / "a.parquet") == [*texts, *texts[::-1]]


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
    (tmp_path / "a.jsonl").write_bytes(ONE)
    assert [file.path for file in locate(Source("web", 1.0, (f"{tmp_path}/*.jsonl",)))] == [f"{tmp_path}/a.jsonl"]
    for refused in (pipe, "/dev/zero"):
        for source in (Source("web", 1.0, (str(refused),)), Source("web", 1.0, url_list=str(refused))):
            with pytest.raises(UserError, match=f"no file at {refused}|{refused} is no regular file"):
                list(source_documents(source))


def test_what_the_disk_refuses_is_reported(tmp_path, byte_tokenizer):
    (tmp_path / "a.jsonl").write_bytes(lines([f"{i} {SHORT}" for i in range(4000)]))
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
