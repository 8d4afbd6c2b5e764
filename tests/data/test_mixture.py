"""Mixture files: what they may say, how each mistake is refused, and the ones that are shipped."""

import re
from pathlib import Path

import pytest

from moh_llm.data.mixture import EMBEDDED, Mixture, Source, load_mixture, mixture_from_files
from moh_llm.errors import UserError

FOLDER = Path(__file__).resolve().parents[2] / "data_mixtures"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
# Tab. D of the paper, percent of the tokens.
PAPER = {
    "redpajama_book": 4.24,
    "redpajama_wikipedia": 3.50,
    "redpajama_arxiv": 4.37,
    "redpajama_stackexchange": 3.19,
    "redpajama_c4": 10.94,
    "dolma": 61.28,
    "pile": 12.48,
}
EVERYTHING = """
name: everything
validation_share: 0.25
sources:
  local:
    weight: 1
    files: [a/*.jsonl, "b/ç d.txt"]
    text_field: body
  hub: {weight: 1, hub: org/name, data_files: "data/*.parquet", revision: v2}
  chat: {weight: 1, files: c.jsonl, type: messages}
  list: {weight: 0.5, url_list: "https://host/list.txt", match: "*/en/*"}
  near: {weight: 0.5, url_list: lists/all.txt}
  python: {weight: 1, builtin: python_topics}
"""


def mixture_of(folder: Path, text: str) -> Mixture:
    (folder / "m.yaml").write_text(text, encoding="utf-8")
    return load_mixture(folder / "m.yaml")


def refusal(path: str | Path) -> str:
    with pytest.raises(UserError) as error:
        load_mixture(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_key_is_read(tmp_path):
    mixture = mixture_of(tmp_path, EVERYTHING)
    files = (f"{tmp_path}/a/*.jsonl", f"{tmp_path}/b/ç d.txt")
    assert mixture.sources == (
        Source("local", 0.2, files, text_field="body"),
        Source("hub", 0.2, hub="org/name", data_files=("data/*.parquet",), revision="v2"),
        Source("chat", 0.2, (f"{tmp_path}/c.jsonl",), type="messages"),
        Source("list", 0.1, url_list="https://host/list.txt", match="*/en/*"),
        Source("near", 0.1, url_list=f"{tmp_path}/lists/all.txt"),
        Source("python", 0.2, builtin="python_topics"),
    )
    assert (mixture.name, mixture.validation_share) == ("everything", 0.25)


def test_what_may_be_left_out(tmp_path):
    mixture = mixture_of(tmp_path, "sources: {1: {weight: 2, files: a.txt}}")
    assert mixture == Mixture("m", (Source("1", 1.0, (f"{tmp_path}/a.txt",)),), 0.05)
    blank = mixture_of(tmp_path, "sources: {a: {weight: 2, files: a.txt, text_field: }}")
    assert blank.sources == (Source("a", 1.0, (f"{tmp_path}/a.txt",)),)


def test_local_paths_are_those_of_the_mixture_file(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    monkeypatch.setenv("CORPUS_ROOT", "/data/text")
    monkeypatch.setenv("HOME", "/people/someone")
    (tmp_path / "m.yaml").write_text(
        "sources: {a: {weight: 1, files: [x.txt, ../y.txt, $CORPUS_ROOT/z, '${CORPUS_ROOT}s/z', ~/w, /v.txt]}}"
    )
    (source,) = load_mixture("../m.yaml").sources
    up = tmp_path.parent
    assert source.files == (
        *(f"{tmp_path}/x.txt", f"{up}/y.txt"),
        *("/data/text/z", "/data/texts/z", "/people/someone/w", "/v.txt"),
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{wieght: 1, files: x}", "unknown key 'wieght'; the keys are weight, files,"),
        ("{weight: 1, files: x, type: messages, text_field: body}", "text_field needs type: text"),
        ("{weight: -1, files: x}", "has weight = -1: "),
        ("{weight: , files: x}", "lacks weight"),
        ("{weight: 1, files: x, url_list: y}", "give exactly one of files, hub, url_list, builtin"),
        ("{weight: 1, files: x, revision: y}", "revision needs hub, which is not given"),
        ("{weight: 1, hub: org/name}", "hub=org/name needs data_files, for example data/*.parquet"),
        ("{weight: 1, files: [x, 1]}", "has files.1 = 1: Input should be a valid string"),
        ("{weight: .inf, files: x}", "has weight = inf: "),
    ],
)
def test_bad_sources(tmp_path, source, message):
    (tmp_path / "m.yaml").write_text(f"sources:\n  good: {{weight: 1, files: x}}\n  web: {source}\n")
    refused = refusal(tmp_path / "m.yaml")
    assert refused.startswith(f"mixture {tmp_path}/m.yaml, source web")
    assert message in refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("source: {}", " has the unknown key 'source'; the keys are name, validation_share, sources"),
        ("name: x", " lacks sources"),
        ("sources: {web: x.jsonl}", " has sources.web = 'x.jsonl': "),
        ("- a", " must be a map with the keys name, validation_share, sources"),
        ("a: [", " cannot be read as YAML: while parsing"),
    ],
)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "m.yaml").write_text(content)
    assert refusal(tmp_path / "m.yaml").startswith(f"mixture {tmp_path}/m.yaml{message}")


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "m.yaml").write_bytes(b"name: \xff\xfe")
    assert refusal(tmp_path / "m.yaml").startswith(f"mixture {tmp_path / 'm.yaml'} cannot be read: ")
    assert refusal(tmp_path) == f"mixture {tmp_path} is not a regular file; name a file"
    assert refusal("nowhere") == "mixture nowhere does not exist; name a YAML file, or 'embedded'"


def test_mixture_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOH_UNSET", raising=False)
    mixture = mixture_from_files(["a.jsonl", "/b/*.txt", "c", "d"], 0.2)
    assert [source.weight for source in mixture.sources] == [0.25] * 4
    assert [source.files for source in mixture.sources[:2]] == [(f"{tmp_path}/a.jsonl",), ("/b/*.txt",)]
    assert (mixture.name, mixture.validation_share) == ("files", 0.2)
    with pytest.raises(UserError, match=r"^text file \$MOH_UNSET/x: .* needs the environment variable MOH_UNSET"):
        mixture_from_files(["$MOH_UNSET/x"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_mixtures(monkeypatch, tmp_path, path):
    monkeypatch.setenv("CORPORA", str(tmp_path))
    mixture = load_mixture(path)
    assert mixture.name == path.stem
    assert sum(source.weight for source in mixture.sources) == pytest.approx(1)
    # Each name becomes a folder of shards.
    assert all(re.fullmatch(r"\w[\w.+-]*", source.name) for source in mixture.sources)
    assert len({source.name for source in mixture.sources}) == len(mixture.sources)
    monkeypatch.delenv("CORPORA")
    if str(tmp_path) in repr(mixture.sources):
        assert "needs the environment variable CORPORA" in refusal(path)
    else:
        assert load_mixture(path) == mixture


def test_the_papers_mixture(monkeypatch, tmp_path):
    monkeypatch.setenv("CORPORA", str(tmp_path))
    mixture = load_mixture(FOLDER / "paper.yaml")
    assert {source.name: 100 * source.weight for source in mixture.sources} == pytest.approx(PAPER, rel=1e-12)


def test_the_embedded_mixture(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_mixture(FOLDER / "embedded.yaml") == EMBEDDED == load_mixture("embedded")
    (tmp_path / "embedded").mkdir()  # a folder does not hide it, such as one of its shards
    assert load_mixture("embedded") == EMBEDDED
    (tmp_path / "embedded").rmdir()
    (tmp_path / "embedded").write_text("sources: {a: {weight: 1, builtin: python_topics}}")
    assert len(load_mixture("embedded").sources) == 1  # a file of that name comes first
