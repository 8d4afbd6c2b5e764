"""Shared n-grams against sets of tuples."""

import numpy as np

from moh_llm.data.overlap import NGRAM, NGrams, numbered
from moh_llm.data.shards import Shard, TokenStream


def ngrams_of(documents):
    return [tuple(d[i : i + NGRAM]) for d in documents for i in range(len(d) - NGRAM + 1)]


def packed(documents):
    return numbered(TokenStream.of([Shard.of([np.array(d) for d in documents])]))


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


def test_nothing_in_common():
    words = [list(range(100))]
    assert NGrams([]).overlap(*packed(words)).shared == 0
    assert NGrams([packed([[1, 2]])]).overlap(*packed(words)).covered_share == 0
    assert NGrams([packed(words)]).overlap(*packed([[5, 6]])).share == 0
