"""What is held out of Python's own text is not in the training part in other words' guise."""

import itertools

import numpy as np

from moh_llm.data.mixture import EMBEDDED
from moh_llm.data.opening import docstrings, embedded_documents
from moh_llm.data.overlap import NGrams, Numbered
from moh_llm.data.tokenizer import is_held_out


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


def test_every_paragraph_of_the_topics_stands_once():
    from pydoc_data.topics import topics

    found = dict(embedded_documents("python_topics"))
    assert list(found) == sorted(found) and len(found) > 0.9 * len(topics)
    paragraphs = [" ".join(p.split()) for text in found.values() for p in text.split("\n\n") if p.strip()]
    assert len(paragraphs) == len(set(paragraphs))
    words = set(itertools.chain.from_iterable(map(str.split, topics.values())))
    assert words == set(itertools.chain.from_iterable(map(str.split, found.values())))
