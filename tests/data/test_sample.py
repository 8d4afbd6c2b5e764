"""The first tokens of a mixture in memory, split in two; the tokenizer's ids, with nothing cut or padded."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moh_llm.data.embedded import embedded_documents
from moh_llm.data.mixture import Mixture, Source, mixture_from_files
from moh_llm.data.sample import sample_mixture
from moh_llm.data.shards import TokenStream
from moh_llm.data.tokenizer import TextTokenizer, is_held_out
from moh_llm.errors import UserError

DOCUMENTS = [f"document {i}: " + "letters and more letters " * (i % 7 + 1) for i in range(200)]
TEXTS = ["A river.", "", " Two\n\nlines\t", "Überschrift, 川, 🙂", "the <end> of a text", "long " * 5000, *DOCUMENTS]


def write(path: Path, documents: list[str] = DOCUMENTS) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


@pytest.fixture(scope="module")
def folder(byte_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return folder


@pytest.fixture
def tokenizer(folder) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def ids_of(stream: TokenStream) -> list[int]:
    return stream.read(0, len(stream))[0].tolist()


def texts_of(stream: TokenStream, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The documents, each of which must be closed by the end token."""
    ids, begins = stream.read(0, len(stream))
    assert begins[0] == 0
    documents = [document.tolist() for document in np.split(ids, begins[1:])]
    assert all(document[-1] == tokenizer.eos_token_id for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def test_tokens_are_the_documents_split_in_two(tmp_path, tokenizer):
    (source,) = sample_mixture(mixture_from_files([write(tmp_path / "a.jsonl")], 0.2), tokenizer)
    held_out = [text for text in DOCUMENTS if is_held_out(text, 0.2)]
    assert texts_of(source.validation, tokenizer) == held_out
    assert texts_of(source.train, tokenizer) == [text for text in DOCUMENTS if text not in held_out]
    assert 0.1 < len(held_out) / len(DOCUMENTS) < 0.3


def test_a_limit_reads_less_but_holds_out_the_same(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl")
    with open(file, "a") as lines:
        lines.write("not JSON\n")  # a limit must not read this far
    mixture = mixture_from_files([file], 0.2)
    (short,) = sample_mixture(mixture, tokenizer, train_tokens=2000, validation_tokens=300)
    with pytest.raises(UserError, match="line 201: not a JSON record"):
        sample_mixture(mixture, tokenizer, train_tokens=2000)
    write(tmp_path / "a.jsonl")
    (whole,) = sample_mixture(mixture, tokenizer)
    assert 2000 <= len(short.train) < len(whole.train)
    assert 300 <= len(short.validation) < len(whole.validation)
    for part in ("train", "validation"):
        ids = ids_of(getattr(short, part))
        assert ids == ids_of(getattr(whole, part))[: len(ids)]


def test_one_long_document_is_cut(tmp_path, tokenizer):
    text = "".join(DOCUMENTS)
    (tmp_path / "a.txt").write_text(text)
    (source,) = sample_mixture(mixture_from_files([str(tmp_path / "a.txt")], 0.1), tokenizer)
    train, validation = ids_of(source.train), ids_of(source.validation)
    assert len(validation) == round(0.1 * len(train + validation))
    assert tokenizer.decode((train + validation)[:-1]) == text
    # The document begins in the one part alone.
    assert source.train.read(0, 10)[1].tolist() == [0]
    assert source.validation.read(0, len(validation))[1].tolist() == []


def test_half_a_surrogate_pair_is_read(tmp_path, tokenizer):
    """JSON may escape one, as text does that was cut within an emoji."""
    file = write(tmp_path / "a.jsonl", ["before", "cut \ud83d here", "after"])
    (source,) = sample_mixture(mixture_from_files([file]), tokenizer)
    texts = tokenizer.decode(ids_of(source.train) + ids_of(source.validation)).split("<end>")
    after, before, cut = sorted(texts[:-1])
    assert (before, cut[:4], cut[-5:], after) == ("before", "cut ", " here", "after")


def test_built_in_text_is_split_by_group(tokenizer):
    (source,) = sample_mixture(Mixture("topics", (Source("a", 1.0, builtin="python_topics"),), 0.1), tokenizer)
    documents = list(embedded_documents("python_topics"))
    for stream, held_out in ((source.train, False), (source.validation, True)):
        assert texts_of(stream, tokenizer) == [text for group, text in documents if is_held_out(group, 0.1) == held_out]


def encoded(tokenizer: PreTrainedTokenizerFast, texts: list[str] = TEXTS) -> list[list[int]]:
    found = list(TextTokenizer.from_tokenizer(tokenizer).encode((text, text) for text in texts))
    assert [group for group, *_ in found] == texts
    return [ids.tolist() for _, ids, _ in found]


def expected(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]


def test_special_tokens_are_added(tokenizer):
    tokenizer.add_special_tokens({"bos_token": AddedToken("<begin>", special=True)})
    special = [("<begin>", tokenizer.bos_token_id), ("<end>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=special)
    assert encoded(tokenizer) == expected(tokenizer)
    assert encoded(tokenizer)[0][0] == tokenizer.bos_token_id
    # One that closes documents by itself: they are not closed twice.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<begin> $A <end>", special_tokens=special)
    assert encoded(tokenizer) == [tokenizer(text)["input_ids"] for text in TEXTS]
    tokenizer.eos_token = None  # and without one they are not closed
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=special[:1])
    assert encoded(tokenizer) == [tokenizer(text)["input_ids"] for text in TEXTS]


def test_nothing_is_cut_or_padded(tokenizer, folder, tmp_path):
    wanted = expected(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=16)
    tokenizer.model_max_length = 4
    tokenizer.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert stored["truncation"] and stored["padding"]
    for own in (TextTokenizer.from_tokenizer(tokenizer), TextTokenizer.load(str(tmp_path))):
        assert [ids.tolist() for _, ids, _ in own.encode((text, text) for text in TEXTS)] == wanted
    # What the caller's own tokenizer does stays as it was.
    assert len(tokenizer.backend_tokenizer.encode("a long text").ids) == 16
    assert TextTokenizer.from_tokenizer(tokenizer).sha256 == TextTokenizer.load(str(folder)).sha256


def test_held_out_documents_count_by_their_windows(tmp_path, tokenizer):
    """As many documents are found as windows are asked for, of texts whose first held-out document has more tokens."""
    texts = [f"{number} " + "letters " * 200 for number in range(3000)]
    mixture = mixture_from_files([write(tmp_path / "a.jsonl", texts)], 0.05)
    (source,) = sample_mixture(mixture, tokenizer, 5000, 64 * 64, window=64)
    assert len(texts_of(source.validation, tokenizer)) >= 64
    found = [text for text in texts if is_held_out(text, 0.05)]
    assert texts_of(source.validation, tokenizer) == found[: len(texts_of(source.validation, tokenizer))]
    (short,) = sample_mixture(mixture, tokenizer, 5000, 64 * 64, window=2048)
    assert len(texts_of(short.validation, tokenizer)) < 10
    # Text for training is what it is without.
    assert ids_of(source.train)[:5000] == ids_of(short.train)[:5000]


def test_limits_are_shared_by_weight_and_sources_make_up_for_each_other(tmp_path, tokenizer):
    def sample(train: int, validation: int, *counts: int):
        files = [write(tmp_path / f"{n}.jsonl", [f"{n} {i} " * 20 for i in range(k)]) for n, k in enumerate(counts)]
        sources = (Source("a", 0.9, (files[0],)), Source("b", 0.1, (files[1],)))
        return sample_mixture(Mixture("m", sources, 0.3), tokenizer, train, validation, window=32)

    one, two = sample(100_000, 3_000, 4000, 4000)
    # And a little more, for whole windows.
    assert 90_000 <= len(one.train) < 92_000 and 10_000 <= len(two.train) < 12_000
    few, many = sample(1000, 64 * 32, 10, 3000)
    assert len(few.validation) < 1000 and len(texts_of(many.validation, tokenizer)) >= 60
