"""Tokenising into shards: what is in them, that it can be stopped anywhere, and that nothing foreign gets in."""

import json
import random
import signal
import time
from pathlib import Path

import forks
import numpy as np
import pytest

from moh_llm.data.locate import locate
from moh_llm.data.mixture import load_mixture
from moh_llm.data.records import source_documents
from moh_llm.data.shards import open_tokens
from moh_llm.data.tasks import make_tasks
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.data.tokenizer import TextTokenizer, is_held_out
from moh_llm.errors import UserError
from moh_llm.records.tokens import read_tokens

NEW = '{"text": "new"}\n'


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_dir()]


def test_shards_hold_the_documents_in_order_and_the_record_counts_them(corpus, tokenizer, tmp_path):
    mixture = load_mixture(corpus)
    record = tokenize_mixture(mixture, tokenizer, tmp_path / "out", workers=1)
    assert record == read_tokens(tmp_path / "out")
    for source, opened in zip(mixture.sources, open_tokens(tmp_path / "out"), strict=True):
        texts = [text for _, text in source_documents(source)]
        for stream, held_out in ((opened.train, False), (opened.validation, True)):
            ids, begins = stream.read(0, len(stream))
            found = [tokenizer.backend.decode(part[:-1]) for part in np.split(ids, begins[1:])]
            assert found == [text for text in texts if is_held_out(text, 0.1) == held_out]
            assert all(part[-1] == tokenizer.end for part in np.split(ids, begins[1:]))
        entry = record.sources[source.name]
        assert entry.documents == len(texts)
        assert entry.tokens == len(opened.train) + len(opened.validation) == sum(len(text) + 1 for text in texts)
        assert [file.bytes for file in entry.text] == [file.size for file in locate(source)]
        assert entry.weight == opened.weight == source.weight
    assert record.tokenizer.sha256 == tokenizer.sha256


def test_bytes_depend_on_nothing_but_the_text(corpus, tokenizer, tmp_path, monkeypatch, shards):
    # Tasks so small that each file is one.
    monkeypatch.setattr("moh_llm.data.tasks._TASK_BYTES", 1000)
    mixture = load_mixture(corpus)
    assert len(make_tasks(mixture, tmp_path / "one")) == 4
    tokenize_mixture(mixture, tokenizer, tmp_path / "one", workers=1)
    tokenize_mixture(mixture, tokenizer, tmp_path / "three", workers=3)
    assert shards(tmp_path / "one") == shards(tmp_path / "three")
    assert len(shards(tmp_path / "one")) == 4 * 2 * 3
    assert not (tmp_path / "three" / "logs").exists()


@pytest.mark.slow
def test_killed_at_random_moments_and_run_again(corpus, tokenizer, tmp_path, shards):
    text = (corpus.parent / "plain-0.jsonl").read_text()
    for number in range(4):
        (corpus.parent / f"large-{number}.jsonl").write_text(text.replace('"0/', f'"{number}/') * 40)
    sources = "".join(f"  large{n}: {{weight: 1, files: large-{n}.jsonl}}\n" for n in range(4))
    corpus.write_text(f"name: large\nsources:\n{sources}")
    tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "unbroken", workers=1)

    output = tmp_path / "killed"
    command = ["-m", "moh_llm.cli", "tokenize", str(corpus), "--tokenizer", tokenizer.name]
    command += ["--output-dir", str(output), "--workers", "2"]
    draw, killed = random.Random(1), 0
    for _ in range(2):
        process = forks.Program(command, tmp_path)
        while process.poll() is None and not hidden(output):
            time.sleep(0.01)
        time.sleep(draw.random() * 0.3)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
        if killed and not (output / "mixture.json").exists():
            with pytest.raises(UserError, match=r"mixture.json"):
                open_tokens(output)
    assert killed
    assert forks.run(*command, folder=tmp_path).returncode == 0
    assert shards(output) == shards(tmp_path / "unbroken")
    time.sleep(0.5)  # processes that outlived their parent end their task
    tokenize_mixture(load_mixture(corpus), tokenizer, output, workers=1)
    assert shards(output) == shards(tmp_path / "unbroken")


def test_going_on_does_only_what_is_left(corpus, tokenizer, tmp_path, shards):
    mixture, output = load_mixture(corpus), tmp_path / "out"
    tokenize_mixture(mixture, tokenizer, output, workers=1)
    before = shards(output)
    (output / "packed" / "train-00000.ds").unlink()
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*.ds")}
    tokenize_mixture(mixture, tokenizer, output, workers=1)
    assert shards(output) == before
    assert all(path.stat().st_mtime_ns == t for path, t in times.items() if path.parent.name != "packed")
    # Other weights write the record and no shard.
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*.ds")}
    edit(corpus.parent, "weight: 5", "weight: 95")
    tokenize_mixture(load_mixture(corpus), tokenizer, output, workers=1)
    assert [source.weight for source in open_tokens(output)] == [0.95, 0.03, 0.02]
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "plain-2.jsonl").write_text(NEW), "made with another text; restore it"),
        (lambda f: (f.parent / "out" / "plain" / "source.json").write_text("{}"), r"source\.json lacks tokenizer"),
        (lambda f: edit(f, "text_field: body", "text_field: x"), "made with another text_field"),
    ],
)  # fmt: skip
def test_tokens_of_other_text_are_left_alone(corpus, tokenizer, tmp_path, change, message, shards):
    output = tmp_path / "out"
    tokenize_mixture(load_mixture(corpus), tokenizer, output, workers=1)
    before = shards(output)
    change(corpus.parent)
    with pytest.raises(UserError, match=message):
        tokenize_mixture(load_mixture(corpus), tokenizer, output, workers=1)
    assert shards(output) == before


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "mixture.yaml").read_text()
    assert old in text
    (folder / "mixture.yaml").write_text(text.replace(old, new))


def test_another_tokenizer_is_refused(corpus, tokenizer, tmp_path):
    tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", workers=1)
    other = TextTokenizer(tokenizer.backend, None, "other")
    with pytest.raises(UserError, match="made with another tokenizer"):
        tokenize_mixture(load_mixture(corpus), other, tmp_path / "out", workers=1)
    with pytest.raises(UserError, match=r"were made with another tokenizer .* than that of other"):
        open_tokens(tmp_path / "out", tokenizer=other)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_record_stops(corpus, tokenizer, tmp_path, workers):
    with (corpus.parent / "plain-0.jsonl").open("a") as file:
        file.write('{"txt": "a"}\n')
    with pytest.raises(UserError, match=r"plain-0\.jsonl, line 151: no text in the field text; the record has txt"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", workers=workers)
    with pytest.raises(UserError, match="is not finished"):
        open_tokens(tmp_path / "out")


def test_a_source_without_text_is_refused(corpus, tokenizer, tmp_path):
    (corpus.parent / "named.jsonl").write_text('{"body": " "}\n')
    with pytest.raises(UserError, match=r"source named holds no text"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", workers=1)


@pytest.mark.parametrize("name", ["../up", ".hidden", ""])
def test_a_source_name_stays_in_the_folder(corpus, tokenizer, tmp_path, name):
    edit(corpus.parent, "plain:", f"{json.dumps(name)}:")
    with pytest.raises(UserError, match="its name becomes a folder"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_an_output_that_holds_something_else_is_left_alone(corpus, tokenizer, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match=r"is not empty and holds no mixture\.json"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "mine", workers=1)
    with pytest.raises(UserError, match="is a file; name a folder"):
        tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "mine" / "letter.txt", workers=1)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
