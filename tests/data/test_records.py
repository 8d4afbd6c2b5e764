"""Documents out of files of every format; filters; every fault is named, and stops the run or is skipped."""

import gzip
import importlib.util
import io
import json
import random
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from moh_llm.data.locate import SourceFile
from moh_llm.data.mixture import Source
from moh_llm.data.records import Reading, read_documents, source_documents
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
    {"text": "e", "lang": ["en"], "score": "0.7", "meta": {"stars": 4}, "meta.lang": "en"},
]


def lines(field: str = "text", documents: Sequence[str] = DOCUMENTS) -> bytes:
    records = ({"id": i, field: text} for i, text in enumerate(documents))
    return "".join(json.dumps(record, ensure_ascii=i % 2 == 0) + "\n" for i, record in enumerate(records)).encode()


def parquet(columns: dict[str, list], rows: int = 1 << 20) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=rows)
    return file.getvalue()


def frames(data: bytes, sizes: Sequence[int]) -> bytes:
    """Zstandard frames of so many bytes each, and one of the rest; some with a checksum, one without content."""
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
    documents = list(read_documents(SourceFile(str(path)), Source("web", 1.0, **source), reading))
    return documents, reading


def refusal(path: Path, skip_bad: bool = False, **source) -> str:
    with pytest.raises(UserError) as error:
        read(path, skip_bad, **source)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


FILES = [
    ("a.jsonl", LINES, DOCUMENTS),
    ("a.JSON", lines("content"), DOCUMENTS),
    ("a.ndjson", lines("raw_content").rstrip(b"\n"), DOCUMENTS),
    ("a.jsonl", lines("document").replace(b"\n", b"\r\n\r\n"), DOCUMENTS),
    ("a.jsonl", b"\xef\xbb\xbf" + LINES, DOCUMENTS),
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
        ([{"meta": {"body": "no"}, "meta.body": "yes"}], "meta.body", ["yes"]),
        ([{"document": "4", "raw_content": "3", "content": "2", "text": "1"}], None, ["1"]),
        ([{"document": "3", "raw_content": "2"}], None, ["2"]),
        # An empty text is one.
        ([{"content": "no", "text": ""}, {"content": "no", "text": "1"}], None, ["1"]),
        ([{"content": "1", "text": None}, {"content": "2", "text": "no"}], "content", ["1", "2"]),
    ],
)
def test_text_fields(tmp_path, kind, records, text_field, documents):
    path = tmp_path / f"a.{kind}"
    columns = {name: [record[name] for record in records] for name in records[0]}
    json_lines = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(parquet(columns) if kind == "parquet" else json_lines.encode())
    assert read(path, text_field=text_field)[0] == documents


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("no_text", [None, ["a"], {"a": "b"}, 5])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_record_without_a_text_does_not_choose_another_field(tmp_path, kind, no_text, place):
    path = tmp_path / f"a.{kind}"
    rows = [{"text": f"{i}", "content": "no"} for i in range(3)]
    if kind == "parquet":
        if no_text is not None:
            return  # a column has one type
        path.write_bytes(parquet({"text": [None if i == place else f"{i}" for i in range(3)], "content": ["no"] * 3}))
    else:
        rows[place]["text"] = no_text
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(zstandard.compress(data) if kind.endswith("zst") else data)
    assert refusal(path).startswith(f"{path}, {'row' if kind == 'parquet' else 'line'} {place + 1}: ")
    documents, reading = read(path, skip_bad=True)
    assert documents == [f"{i}" for i in range(3) if i != place] and reading.bad == 1


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


def test_files_with_other_text_fields_are_named(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    (tmp_path / "b.jsonl").write_text('{"content": "2"}\n')
    files = [SourceFile(f"{tmp_path}/{name}.jsonl") for name in "ab"]
    assert [text for _, text in source_documents(Source("web", 1.0), files)] == ["1", "2"]
    (said,) = capsys.readouterr().err.splitlines()
    assert all(file.name in said for file in files)


def test_empty_documents_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": ""}\n  \n{"text": " \\n\\t"}\n{"text": " x "}\n\n')
    documents, reading = read(tmp_path / "a.jsonl")
    assert documents == [" x "]
    assert reading == Reading(documents=1, bytes=3, empty=2)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, "abcde"),
        ({"lang": "en"}, "ac"),
        ({"lang": ["de", "en"]}, "abc"),
        ({"score": {"max": 0.5}}, "ab"),
        ({"score": {"min": 0.2, "max": 0.9}}, "b"),
        ({"score": 1}, "c"),
        ({"meta.lang": "en"}, "ae"),
        ({"meta.stars": {"min": 2, "max": 3}}, "bc"),
        ({"meta.stars": {"min": 2}, "lang": "en"}, "c"),
        ({"missing": {"min": 0}}, ""),
        ({"meta.lang.code": ["en"]}, ""),
    ],
)
def test_filters(tmp_path, filters, kept):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    documents, reading = read(tmp_path / "a.jsonl", filters=filters)
    assert documents == list(kept)
    assert reading == Reading(documents=len(kept), bytes=len(kept), filtered=len(RECORDS) - len(kept))
    rows = RECORDS[:4]
    columns = {name: [record.get(name) for record in rows] for name in ("text", "lang", "score", "meta")}
    (tmp_path / "a.parquet").write_bytes(parquet(columns))
    assert read(tmp_path / "a.parquet", filters=filters)[0] == [text for text in kept if text != "e"]


def test_a_filtered_record_needs_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"lang": "de"}\n{"lang": "en", "body": "x"}\n')
    assert read(tmp_path / "a.jsonl", filters={"lang": "en"}, text_field="body")[0] == ["x"]


# Name, content, what is said, and what is read where bad records are skipped (None: some of the first documents).
FAULTS = [
    ("a.jsonl", ONE + b'{"text": \n' + TWO, ", line 2: not a JSON record", ["1", "2"]),
    ("a.jsonl", ONE + b"[" * 100_000 + b"\n" + TWO, ", line 2: not a JSON record", ["1", "2"]),
    ("a.jsonl", ONE + b"[1]\n" + TWO, ", line 2: expected a JSON object, found list", ["1", "2"]),
    ("a.jsonl", ONE + b'{"id": 1, "x": ""}\n' + TWO, ", line 2: no text field text; the record has id, x", ["1", "2"]),
    ("a.jsonl", b'{"x": 1}\n' + TWO, ", line 1: no text field text or content or raw_content or document; the", ["2"]),
    ("a.jsonl", ONE + b'{"text": 5}\n' + TWO, ", line 2: its text is int, no text", ["1", "2"]),
    ("a.jsonl", ONE + b'{"a\\nb": 5}\n' + TWO, ", line 2: no text field text", ["1", "2"]),
    ("a.jsonl", ONE + b'{"text": "\xc3\xa4\xff"}\n' + TWO, ", line 2: byte 13 is not UTF-8", ["1", "2"]),
    ("a.parquet", parquet({"text": ["1", None, "2"]}), ", row 2: no text field text; the record has text", ["1", "2"]),
    ("a.txt", b"ab\xff", ": byte 3 is not UTF-8", []),
    *((name, b"", " is empty", []) for name in ("a.txt", "a.jsonl.zst")),
    ("a.jsonl.gz", gzip.compress(b""), " is empty", []),
    ("a.jsonl.gz", b"not gzip", " cannot be read past record 0: Not a gzipped file", []),
    ("a.jsonl.gz", GZIP[:-8] + bytes(4) + GZIP[-4:], " cannot be read past record ", None),
    ("a.jsonl.zst", b"not zstd", " cannot be read past record 0: ", []),
    ("a.jsonl.zst", ZSTD + b"and more", " cannot be read past record 200: ", DOCUMENTS),
    ("a.jsonl.zst", ZSTD[:-4] + bytes(4), " cannot be read past record ", None),
    *(("a.parquet", data, " cannot be read past record 0: ", []) for data in (b"", b"PAR1", PARQUET[:-1], PARQUET[1:])),
    ("a.parquet", PARQUET.replace(PARQUET[2000:2200], bytes(200)), " cannot be read past record ", None),
]


@pytest.mark.parametrize(("name", "data", "message", "kept"), FAULTS, ids=[fault[0] + fault[2] for fault in FAULTS])
def test_a_fault_stops_or_is_skipped(tmp_path, name, data, message, kept):
    (tmp_path / name).write_bytes(data)
    refused = refusal(tmp_path / name)
    assert refused.startswith(f"{tmp_path / name}{message}")
    assert refused.endswith("; correct it, or pass --on-bad-record skip to leave such records out")
    documents, reading = read(tmp_path / name, skip_bad=True)
    assert documents == (DOCUMENTS[: len(documents)] if kept is None else kept)
    assert (reading.documents, reading.bad, len(reading.examples)) == (len(documents), 1, 1)
    assert refused.startswith(reading.examples[0])


@pytest.mark.parametrize("cut", [1, 11, 100, -200, -8, -4, -1])
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


def test_few_of_many_faults_are_quoted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes((b"bad\n" + ONE) * 8)
    documents, reading = read(tmp_path / "a.jsonl", skip_bad=True)
    assert (documents, reading.bad) == (["1"] * 8, 8)
    wheres = [example.split(": ")[0] for example in reading.examples]
    assert wheres == [f"{tmp_path}/a.jsonl, line {number}" for number in (1, 3, 5, 7, 9)]


@pytest.mark.parametrize("field", ["body", "meta.body"])
def test_columns_beside_a_filter(tmp_path, field):
    (tmp_path / "a.parquet").write_bytes(parquet({"lang": ["en"], field: ["yes"]}))
    assert read(tmp_path / "a.parquet", filters={"lang": "en"}, text_field=field)[0] == ["yes"]


@pytest.mark.parametrize("skip_bad", [False, True])
def test_what_is_no_bad_record(tmp_path, monkeypatch, skip_bad):
    assert refusal(tmp_path / "a.jsonl", skip_bad).endswith(" is gone; it was there when the source was listed")
    known = ".jsonl, .json, .ndjson, .parquet, .txt, .md"
    assert f"format not known by its ending; known are {known}" in refusal(tmp_path / "a.csv.gz", skip_bad)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zstandard" else find_spec(name))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name, data, package in (("a.jsonl.zst", ZSTD, "zstandard"), ("a.parquet", PARQUET, "pyarrow")):
        (tmp_path / name).write_bytes(data)
        assert refusal(tmp_path / name, skip_bad).endswith(f'reading it needs {package}; pip install "moh-llm[data]"')


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_position(tmp_path, name):
    texts = [random.Random(i).randbytes(50).hex() for i in range(8000)]
    columns = {"text": texts, "id": [f"{i % 2}" for i in range(8000)]}
    data = b"".join(json.dumps({"id": f"{i % 2}", "text": text}).encode() + b"\n" for i, text in enumerate(texts))
    pack = {"gz": gzip.compress, "zst": zstandard.compress, "parquet": lambda _: parquet(columns, rows=400)}
    data = pack.get(name.rsplit(".", 1)[1], bytes)(data)
    (tmp_path / name).write_bytes(data)
    reading, source = Reading(), Source("web", 1.0, filters={"id": "1"})
    found = read_documents(SourceFile(f"{tmp_path}/{name}"), source, reading)
    positions, documents = zip(*((reading.stored, text) for text in found), strict=True)
    assert list(documents) == texts[1::2] and list(positions) == sorted(positions)
    assert 0.95 * len(data) < positions[-1] <= len(data)
    assert positions[0] < 0.2 * len(data) or name == "a.parquet"  # which is read ahead
