"""Held-out text of Python is not in the training part in other words."""

import itertools
import runpy
from pathlib import Path

import numpy as np

from moh_llm.data.embedded import docstrings, embedded_documents
from moh_llm.data.mixture import EMBEDDED
from moh_llm.data.tokenizer import is_held_out

_SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "held_out.py"))
NGrams, Numbered = _SCRIPT["NGrams"], _SCRIPT["Numbered"]


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
    for name, texts in parts[True].items():
        ids, documents = words_of(texts, vocabulary)
        share = read.overlap(ids, documents)
        assert len(ids) > 1000 and share < 0.03, (name, share)
