"""Opening tokens for training, the cache, and the two commands."""

import json
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moh_llm.cli import main
from moh_llm.data.mixture import load_mixture
from moh_llm.data.shards import cache_folder, open_tokens, tokens_for
from moh_llm.data.tokenize import tokenize_mixture
from moh_llm.errors import UserError


@pytest.fixture
def model_tokenizer(tokenizer):
    return AutoTokenizer.from_pretrained(tokenizer.name)


def test_text_is_tokenised_once_into_the_cache(corpus, tokenizer, model_tokenizer, token_cache):
    _, folder, sources = tokens_for(str(corpus), model_tokenizer)
    assert Path(folder).is_relative_to(token_cache)
    # Other weights find the same tokens, other text does not.
    corpus.write_text(corpus.read_text().replace("weight: 5", "weight: 15"))
    _, again, weighted = tokens_for(str(corpus), model_tokenizer)
    assert again == folder
    assert [source.weight for source in weighted] == [0.75, 0.15, 0.1]
    with (corpus.parent / "named.jsonl").open("a") as file:
        file.write('{"body": "more"}\n')
    _, other, longer = tokens_for(str(corpus), model_tokenizer)
    assert other != folder and len(longer[2].train) + len(longer[2].validation) > len(sources[2].train)


def test_much_text_is_not_tokenised_on_the_way(corpus, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr("moh_llm.data.shards.ON_THE_FLY_BYTES", 1000)
    with pytest.raises(UserError, match=r"mixture made has more than .* GiB of text.*tokenise it first \(moh-llm tok"):
        cache_folder(load_mixture(corpus), tokenizer)
    (tmp_path / "list.txt").write_text("https://example.org/a.jsonl")
    corpus.write_text(f"sources: {{a: {{weight: 1, url_list: {tmp_path}/list.txt}}}}")
    with pytest.raises(UserError, match="or files of unknown size; tokenise it first"):
        cache_folder(load_mixture(corpus), tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "mixture.json").unlink(), r"holds no mixture\.json; name a folder of moh-llm tokenize"),
        (
            lambda f: (f / "mixture.json").write_text('{"status": "finished"}'),
            r"lacks name; tokenize the text",
        ),
        (lambda f: (f / "plain" / "train-00000.ds").write_bytes(b"abc"), r"plain/train-00000\.ds has 3 bytes"),
        (lambda f: (f / "plain" / "train-00000.ds.index").write_bytes(b"abc"), r"\.ds\.index has 3 bytes, \d+ were wr"),
    ],
)
def test_damaged_tokens_are_refused(corpus, tokenizer, tmp_path, change, message):
    tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", workers=1)
    change(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        open_tokens(tmp_path / "out")


def tokenize(corpus: Path, tokenizer, output: Path, *flags: str) -> int:
    return main(["tokenize", str(corpus), "--tokenizer", tokenizer.name, "--output-dir", str(output), *flags])


def test_the_commands(corpus, tokenizer, tmp_path, capsys):
    output = tmp_path / "out"
    assert tokenize(corpus, tokenizer, output) == 0
    said = capsys.readouterr().out
    record = json.loads((output / "mixture.json").read_text())
    assert f"{output}: {record['tokens']:,} tokens" in said

    assert main(["mixture", "show", str(output), "--tokens", "1M"]) == 0
    said = capsys.readouterr().out
    plain = len(open_tokens(output)[0].train)
    assert "500,000" in said and f"{plain:,}" in said and f"{500_000 / plain:.2f}" in said
    assert main(["mixture", "show", str(corpus)]) == 0
    assert "50,000,000,000" in capsys.readouterr().out


def test_open_tokens_keep_no_file_open(corpus, tokenizer, tmp_path):
    tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", workers=1)
    before = len(os.listdir("/dev/fd"))
    opened = open_tokens(tmp_path / "out")
    assert len(os.listdir("/dev/fd")) == before and sum(len(source.train) for source in opened) > 100


def test_tokens_without_a_row_in_the_embedding_are_refused(corpus, tokenizer, model_tokenizer, tmp_path):
    tokenize_mixture(load_mixture(corpus), tokenizer, tmp_path / "out", workers=1)
    streams = [stream for source in open_tokens(tmp_path / "out") for stream in (source.train, source.validation)]
    largest = max(int(stream.read(0, len(stream))[0].max()) for stream in streams)
    assert largest + 1 < tokenizer.vocab_size  # else a model of one row more would not be looked at
    tokens_for(str(tmp_path / "out"), model_tokenizer, largest + 1)
    with pytest.raises(UserError, match=f"hold id {largest}, and the model embeds ids below vocab_size={largest}"):
        tokens_for(str(tmp_path / "out"), model_tokenizer, largest)
