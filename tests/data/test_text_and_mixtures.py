"""Reading text in every format, mixtures from files and YAML, tokenising with a held-out part."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from moh_llm.data.mixture import EMBEDDED, Source, load_mixture, mixture_from_arguments, mixture_from_files
from moh_llm.data.text import iter_documents
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [f"document {i}: " + "letters and more letters " * (i % 7 + 1) for i in range(200)]


def lines(field: str = "text") -> str:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(DOCUMENTS))


@pytest.fixture(scope="module")
def tokenizer(make_llama):
    return AutoTokenizer.from_pretrained(make_llama())


def read(path: Path, **kwargs) -> list[str]:
    return list(iter_documents(Source("s", 1.0, (str(path),), **kwargs)))


def test_formats(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl").write_text(lines())
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        file.write(lines("content"))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines("raw_content").encode()))
    for name in ("a.jsonl", "b.json.gz", "c.jsonl.zst"):
        assert read(tmp_path / name) == DOCUMENTS
    (tmp_path / "d.txt").write_text("one document\n\nof two paragraphs")
    assert read(tmp_path / "d.txt") == ["one document\n\nof two paragraphs"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a.jsonl, line 2: not a JSON record"),
        ("a.jsonl", b"[1]\n", "line 1: expected one JSON object a line"),
        ("a.jsonl", b'{"id": 1, "words": "x"}\n', "line 1: no text field .*; the record has id, words"),
        ("a.jsonl.gz", gzip.compress(lines().encode())[:100], "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz cannot be read"),
        ("a.jsonl.zst", b"not zstd", "a.jsonl.zst cannot be read"),
        ("a.parquet", b"PAR1", "format not known by its ending"),
        ("a.jsonl", b"\xff\xfe{}", "a.jsonl cannot be read"),
    ],
)
def test_unreadable_text(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_text_field_is_used(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert read(tmp_path / "a.jsonl", text_field="body") == ["yes"]


def test_embedded_text_is_there():
    for source in EMBEDDED.sources:
        documents = iter_documents(source)
        assert len(next(documents)) > 0 and len(next(documents)) > 0


def test_shipped_mixtures(monkeypatch, tmp_path):
    assert load_mixture(ROOT / "data_mixtures" / "embedded.yaml") == EMBEDDED == load_mixture("embedded")
    with pytest.raises(UserError, match="needs the environment variable CORPORA"):
        monkeypatch.delenv("CORPORA", raising=False)
        load_mixture(ROOT / "data_mixtures" / "paper.yaml")
    monkeypatch.setenv("CORPORA", str(tmp_path))
    for path in (ROOT / "data_mixtures").glob("*.yaml"):
        for name in ("book", "wikipedia", "arxiv", "stackexchange", "c4"):
            (tmp_path / f"redpajama_{name}").mkdir(exist_ok=True)
            (tmp_path / f"redpajama_{name}" / "train-0.jsonl").write_text(lines())
        for name in ("dolma", "pile"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "train-0.json.gz").write_bytes(gzip.compress(lines().encode()))
        assert load_mixture(path).name == path.stem
    paper = {source.name: source.weight for source in load_mixture(ROOT / "data_mixtures" / "paper.yaml").sources}
    assert sum(paper.values()) == pytest.approx(1)
    assert paper["dolma"] == pytest.approx(0.6128) and paper["redpajama_c4"] == pytest.approx(0.1094)


def test_mixture_arguments(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(lines())
    mixture = mixture_from_arguments([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")])
    assert [source.weight for source in mixture.sources] == [0.5, 0.5]
    assert len(mixture.sources[1].files) == 2
    assert mixture_from_arguments(["embedded"]) is EMBEDDED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sources: {a: {wieght: 1, files: a.jsonl}}", "source a: unknown key 'wieght'; did you mean 'weight'"),
        ("source: {}", "unknown key 'source'; did you mean 'sources'"),
        ("sources: {a: {weight: -1, files: a.jsonl}}", "source a: weight=-1 must be a positive number"),
        ("sources: {a: {weight: 1, files: no.jsonl}}", "source a: no file at"),
        ("sources: {a: {weight: 1}}", "source a: give either files or builtin"),
        ("sources: {a: {weight: 1, builtin: cpython}}", "builtin=cpython must be one of"),
        ("sources: {}", "sources must name at least one source"),
        ("validation_share: 2\nsources: {}", "validation_share=2 must lie between 0 and 1"),
        ("- a", "must be a map"),
        ("a: [", "cannot be read"),
    ],
)
def test_bad_mixtures(tmp_path, content, message):
    (tmp_path / "m.yaml").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load_mixture(tmp_path / "m.yaml")
    assert "\n" not in str(error.value)


def test_missing_mixture():
    with pytest.raises(UserError, match="mixture nowhere does not exist"):
        load_mixture("nowhere")


def test_tokens_are_the_documents_split_in_two(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(lines())
    (source,) = tokenize_mixture(mixture_from_files([str(tmp_path / "a.jsonl")], 0.2), tokenizer)
    texts = []
    for part in (source.train, source.validation):
        assert part.document_starts[0] == 0
        for ids in np.split(part.tokens, part.document_starts[1:]):
            assert ids[-1] == tokenizer.eos_token_id
            texts.append(tokenizer.decode(ids[:-1]))
    assert sorted(texts) == sorted(DOCUMENTS)
    assert 0.1 < len(source.validation.document_starts) / len(DOCUMENTS) < 0.3


def test_a_limit_reads_less_but_holds_out_the_same(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(lines() + "not JSON\n")  # a limit must not read this far
    mixture = mixture_from_files([str(tmp_path / "a.jsonl")], 0.2)
    (short,) = tokenize_mixture(mixture, tokenizer, train_tokens=2000, validation_tokens=300)
    assert len(short.train) >= 2000 and len(short.validation) >= 300
    (tmp_path / "a.jsonl").write_text(lines())
    (whole,) = tokenize_mixture(mixture, tokenizer)
    for part in ("train", "validation"):
        tokens = getattr(short, part).tokens
        assert np.array_equal(tokens, getattr(whole, part).tokens[: len(tokens)])


def test_one_long_document_is_cut(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("".join(DOCUMENTS))
    (source,) = tokenize_mixture(mixture_from_files([str(tmp_path / "a.txt")], 0.1), tokenizer)
    total = len(source.train) + len(source.validation)
    assert len(source.validation) == round(0.1 * total)
    ids = np.concatenate([source.train.tokens, source.validation.tokens])
    assert tokenizer.decode(ids[:-1]) == "".join(DOCUMENTS)


def test_empty_source(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "  "}\n')
    with pytest.raises(UserError, match="holds no text"):
        tokenize_mixture(mixture_from_files([str(tmp_path / "a.jsonl")]), tokenizer)


def test_real_corpora_are_read(shared, tokenizer):
    corpora = shared / "data" / "corpora"
    files = [str(path) for name in ("dolma", "pile", "redpajama_c4") for path in sorted((corpora / name).glob("val*"))]
    sources = tokenize_mixture(mixture_from_files(files), tokenizer, 4096, 512)
    assert [len(source.train) > 1365 for source in sources] == [True] * 3
