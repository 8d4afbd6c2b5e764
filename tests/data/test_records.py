"""Documents out of files of every format; filters; every fault is named, and stops the run or is skipped."""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from moh_llm.data.locate import SourceFile
from moh_llm.data.mixture import Source
from moh_llm.data.records import Reading, source_documents
from moh_llm.errors import UserError

zstandard = pytest.importorskip("zstandard")
pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")

DOCUMENTS = [f"документ {i}: " + "letters and more letters " * (i % 7 + 1) for i in range(200)]
RECORDS = [
    {"text": "a", "lang": "en", "score": 0.1, "meta": {"lang": "en", "stars": 1}},
    {"text": "b", "lang": "de", "score": 0.5, "meta": {"lang": "fr", "stars": 2}},
    {"text": "c", "lang": "en", "score": 1, "meta": {"lang": "de", "stars": 3}},
    {"text": "d", "score": None, "meta": None},
]


def json_lines(records: Sequence[dict]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=i % 2 == 0) + "\n" for i, record in enumerate(records)).encode()


def lines(field: str = "text") -> bytes:
    return json_lines([{"id": i, field: text} for i, text in enumerate(DOCUMENTS)])


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


def read(path: Path, skip_bad: bool = False, **source) -> tuple[list[str], Reading]:
    reading = Reading(skip_bad)
    found = source_documents(Source("web", 1.0, **source), [SourceFile(str(path))], reading)
    return [text for _, text in found], reading


def refusal(path: Path, skip_bad: bool = False, **source) -> str:
    with pytest.raises(UserError) as error:
        read(path, skip_bad, **source)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


FILES = [
    ("a.jsonl", LINES, DOCUMENTS),
    ("a.jsonl", lines("document").replace(b"\n", b"\r\n\r\n"), DOCUMENTS),
    ("a.jsonl.gz", gzip.compress(LINES[:999]) + gzip.compress(b"") + gzip.compress(LINES[999:]), DOCUMENTS),
    ("a.ndjson.zstd", zstandard.compress(b"\xef\xbb\xbf" + LINES), DOCUMENTS),
    ("a.jsonl.zst", frames(LINES, [1000, 0, 1, 5000, 3000]), DOCUMENTS),
    # What pzstd writes: skippable frames before the others.
    ("a.jsonl.zst", b"\x50\x2a\x4d\x18\x04\0\0\0pzst" + ZSTD + b"\x5f\x2a\x4d\x18\0\0\0\0", DOCUMENTS),
    ("a.parquet", parquet({"id": list(range(200)), "text": DOCUMENTS}), DOCUMENTS),
    ("a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\rthree", ["one\n\ntwo\rthree"]),
    ("a.md.gz", gzip.compress(b"# heading"), ["# heading"]),
    ("a.txt.zst", frames(b"one two three", [3, 4]), ["one two three"]),
]


@pytest.mark.parametrize(("name", "data", "documents"), FILES, ids=[file[0] for file in FILES])
def test_formats(tmp_path, name, data, documents):
    (tmp_path / name).write_bytes(data)
    found, reading = read(tmp_path / name)
    assert found == documents
    assert reading == Reading(documents=len(documents), bytes=len("".join(documents).encode()))


def test_a_given_format_comes_before_the_ending(tmp_path):
    files = {"part-00000": ("jsonl", LINES), "a.txt.gz": ("jsonl", GZIP), "a.txt": ("parquet", PARQUET)}
    for name, (kind, data) in files.items():
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name, format=kind)[0] == DOCUMENTS
    assert read(tmp_path / "part-00000", format="text")[0] == [LINES.decode()]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("records", "text_field", "documents"),
    [
        ([{"text": "no", "body": "yes"}], "body", ["yes"]),
        ([{"meta": {"x": {"y": "yes"}}}], "meta.x.y", ["yes"]),
        ([{"document": "4", "raw_content": "3", "content": "2", "text": "1"}], None, ["1"]),
        # An empty text is one.
        ([{"content": "no", "text": ""}, {"content": "no", "text": "1"}], None, ["1"]),
        ([{"content": "1", "text": None}, {"content": "2", "text": "no"}], "content", ["1", "2"]),
    ],
)
def test_text_fields(tmp_path, kind, records, text_field, documents):
    path = tmp_path / f"a.{kind}"
    columns = {name: [record[name] for record in records] for name in records[0]}
    path.write_bytes(parquet(columns) if kind == "parquet" else json_lines(records))
    assert read(path, text_field=text_field)[0] == documents


@pytest.mark.parametrize("skip_bad", [False, True])
def test_another_text_field_in_later_records_is_refused(tmp_path, skip_bad):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "1"}\n{"content": "2", "text": "no"}\n')
    assert refusal(path, skip_bad).startswith(f"{path}, line 2: ")
    assert read(path, text_field="content")[0] == ["1", "2"]
    # Without the field of the first record, one is a bad record, whatever else it has.
    path.write_text('{"text": "1", "content": "no"}\n{"content": "no"}\n{"text": "2"}\n')
    assert refusal(path).startswith(f"{path}, line 2: no text field text")
    assert read(path, skip_bad=True)[0] == ["1", "2"]


def test_empty_documents_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": ""}\n  \n{"text": " \\n\\t"}\n{"text": " x "}\n\n')
    documents, reading = read(tmp_path / "a.jsonl")
    assert documents == [" x "]
    assert reading == Reading(documents=1, bytes=3, empty=2)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, "abcd"),
        ({"lang": "en"}, "ac"),
        ({"score": {"min": 0.2, "max": 0.9}}, "b"),
        ({"score": ["x", 1]}, "c"),
        ({"meta.lang": "en"}, "a"),
        ({"meta.stars": {"min": 2}, "lang": "en"}, "c"),
        ({"meta.lang.code": ["en"]}, ""),
    ],
)
def test_filters(tmp_path, kind, filters, kept):
    columns = {name: [record.get(name) for record in RECORDS] for name in ("text", "lang", "score", "meta")}
    path = tmp_path / f"a.{kind}"
    path.write_bytes(parquet(columns) if kind == "parquet" else json_lines(RECORDS))
    documents, reading = read(path, filters=filters)
    assert documents == list(kept)
    assert reading == Reading(documents=len(kept), bytes=len(kept), filtered=len(RECORDS) - len(kept))


@pytest.mark.parametrize(
    ("accepted", "value", "message"),
    [
        (0, "00", "its n is a text, and the filter wants a number; put it in quotes"),
        (True, 1, "its n is a number, and the filter wants true or false"),
        ("en", ["en"], "its n is of type list, and the filter wants a text"),
    ],
)
def test_a_filter_of_another_type_than_the_field_is_reported(tmp_path, accepted, value, message):
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": "x", "n": value}]))
    assert f"a.jsonl, line 1: {message}" in refusal(tmp_path / "a.jsonl", filters={"n": accepted})


def test_a_filtered_record_needs_no_text_and_a_text_file_takes_no_filter(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"lang": "de"}\n{"lang": "en", "body": "x"}\n')
    assert read(tmp_path / "a.jsonl", filters={"lang": "en"}, text_field="body")[0] == ["x"]
    (tmp_path / "a.txt").write_text("a river")
    assert "filters need JSON lines or parquet" in refusal(tmp_path / "a.txt", filters={"lang": "en"})


# Name, content, what is said, and what is read where bad records are skipped (None: some of the first documents).
FAULTS = [
    ("a.jsonl", ONE + b'{"text": \n' + TWO, ", line 2: not a JSON record", ["1", "2"]),
    ("a.jsonl", ONE + b"[" * 100_000 + b"\n" + TWO, ", line 2: not a JSON record", ["1", "2"]),
    ("a.jsonl", ONE + b'{"id": 1, "x": ""}\n' + TWO, ", line 2: no text field text; the record has id, x", ["1", "2"]),
    ("a.jsonl", b'{"x": 1}\n' + TWO, ", line 1: no text field text or content or raw_content or document; the", ["2"]),
    ("a.jsonl", ONE + b'{"text": 5}\n' + TWO, ", line 2: its text is int, not a text", ["1", "2"]),
    ("a.jsonl", ONE + b'{"text": "\xc3\xa4\xff"}\n' + TWO, ", line 2: byte 13 is not UTF-8", ["1", "2"]),
    ("a.parquet", parquet({"text": ["1", None, "2"]}), ", row 2: its text is null, not a text", ["1", "2"]),
    ("a.txt", b"ab\xff", ": byte 3 is not UTF-8", []),
    ("a.jsonl.zst", b"", " is empty", []),
    ("a.jsonl.gz", b"not gzip", " cannot be read past record 0: Not a gzipped file", []),
    ("a.jsonl.gz", GZIP[:-8] + bytes(4) + GZIP[-4:], " cannot be read past record ", None),
    ("a.jsonl.zst", ZSTD + b"and more", " cannot be read past record ", None),
    *(("a.parquet", data, " cannot be read past record 0: ", []) for data in (b"", PARQUET[:-1], PARQUET[1:])),
    ("a.parquet", PARQUET.replace(PARQUET[2000:2200], bytes(200)), " cannot be read past record ", None),
]


@pytest.mark.parametrize(("name", "data", "message", "kept"), FAULTS, ids=[fault[0] + fault[2] for fault in FAULTS])
def test_a_fault_stops_or_is_skipped(tmp_path, name, data, message, kept):
    (tmp_path / name).write_bytes(data)
    refused = refusal(tmp_path / name)
    assert refused.startswith(f"{tmp_path / name}{message}") and "--on-bad-record skip" in refused
    documents, reading = read(tmp_path / name, skip_bad=True)
    assert documents == (DOCUMENTS[: len(documents)] if kept is None else kept)
    assert (reading.documents, reading.bad, len(reading.examples)) == (len(documents), 1, 1)
    assert refused.startswith(reading.examples[0])


@pytest.mark.parametrize("cut", [11, -200, -4])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_truncated(tmp_path, name, cut):
    data = GZIP if name.endswith("gz") else ZSTD
    (tmp_path / name).write_bytes(data[:cut])
    assert " cannot be read past record " in refusal(tmp_path / name)
    documents, reading = read(tmp_path / name, skip_bad=True)
    assert documents == DOCUMENTS[: len(documents)] and reading.bad == 1
    # The same behind a whole stream.
    (tmp_path / name).write_bytes(data + data[:cut])
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
        assert read(tmp_path / name, skip_bad=True)[1].bad == 1


@pytest.mark.parametrize("skip_bad", [False, True])
def test_what_is_no_bad_record(tmp_path, monkeypatch, skip_bad):
    assert refusal(tmp_path / "a.jsonl", skip_bad).endswith(" is gone; it was there when the source was listed")
    known = ".jsonl, .json, .ndjson, .parquet, .txt, .md"
    assert f"unknown ending; known are {known}" in refusal(tmp_path / "a.csv.gz", skip_bad)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name, data in {"a.jsonl.zst": ZSTD, "a.parquet": PARQUET}.items():
        (tmp_path / name).write_bytes(data)
        assert refusal(tmp_path / name, skip_bad).endswith('reading it needs pyarrow; pip install "moh-llm[data]"')
