"""Shared n-grams against sets of tuples; held-out text of Python is not in the training part in other words."""

import itertools
import runpy
from pathlib import Path

import numpy as np

from moh_llm.data.embedded import docstrings, embedded_documents
from moh_llm.data.mixture import EMBEDDED
from moh_llm.data.shards import TokenStream
from moh_llm.data.tokenizer import is_held_out

_SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "held_out.py"))
NGRAM, NGrams, Numbered, numbered = (_SCRIPT[name] for name in ("NGRAM", "NGrams", "Numbered", "numbered"))


def ngrams_of(documents):
    return [tuple(d[i : i + NGRAM]) for d in documents for i in range(len(d) - NGRAM + 1)]


def packed(documents):
    return numbered(TokenStream.from_documents([np.array(d) for d in documents]))


def test_counts_are_those_of_sets():
    generator = np.random.default_rng(0)
    draw = lambda length: generator.integers(0, 50_000, length).tolist()  # noqa: E731
    copied = draw(40)
    train = [draw(200), [*draw(20), *copied, *draw(5)], copied[:5], draw(NGRAM - 1), draw(NGRAM)]
    # A copy, two short documents of which one is too short, a copy with one token changed, one over two documents.
    other = [*copied[:20], copied[20] + 1, *copied[21:]]
    held_out = [[*draw(30), *copied, *draw(30)], train[3], train[4], other, copied[:7], copied[7:14], draw(3)]
    known = set(ngrams_of(train))
    wanted = [ngram in known for ngram in ngrams_of(held_out)]
    covered = 0
    for document in held_out:
        marks = np.zeros(len(document), dtype=bool)
        for i in range(len(document) - NGRAM + 1):
            marks[i : i + NGRAM] |= tuple(document[i : i + NGRAM]) in known
        covered += marks.sum()
    found = NGrams([packed(train)]).overlap(*packed(held_out))
    assert (found.ngrams, found.shared) == (len(wanted), sum(wanted))
    assert (found.tokens, found.covered) == (sum(map(len, held_out)), covered)
    assert found.shared == 28 + 1 + 8 + 7 and found.share == found.shared / found.ngrams


def words_of(texts: list[str], vocabulary: dict[str, int]) -> Numbered:
    """Words as ids: indentation, which tells a docstring from its source, is no word."""
    words = [text.split() for text in texts]
    ids = [vocabulary.setdefault(word, len(vocabulary)) for word in itertools.chain.from_iterable(words)]
    return np.array(ids), np.repeat(np.arange(len(words)), [len(each) for each in words])


def test_held_out_text_shares_little_with_training_text():
    parts: dict[bool, dict[str, list[str]]] = {False: {}, True: {}}
    for name in ("python_topics", "python_sources"):
        for group, text in embedded_documents(name):
            parts[is_held_out(group, EMBEDDED.validation_share)].setdefault(name, []).append(text)
    # All that the training part's docstrings say is in its sources; of the held-out ones some are enough.
    parts[True]["python_docstrings"] = [docstrings(code) for code in parts[True]["python_sources"][::3]]
    vocabulary: dict[str, int] = {}
    read = NGrams(words_of(texts, vocabulary) for texts in parts[False].values())
    found = {name: read.overlap(*words_of(texts, vocabulary)) for name, texts in parts[True].items()}
    assert all(overlap.ngrams > 1000 for overlap in found.values())
    for name, overlap in found.items():
        assert overlap.covered_share < 0.05, (name, overlap)


def test_views_of_a_module_have_one_group():
    codes = {code: group for group, code in itertools.islice(embedded_documents("python_sources"), 12)}
    wanted = [(group, text) for code, group in codes.items() if (text := docstrings(code))]
    assert len({group for group, _ in wanted}) > 3
    assert list(itertools.islice(embedded_documents("python_docstrings"), len(wanted))) == wanted
