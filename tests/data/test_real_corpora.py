"""The paper's mixture (Tab. D) over real text of its seven sources, each in its own format."""

import random
from pathlib import Path

import numpy as np
import pytest

from moh_llm.data.mixture import load_mixture
from moh_llm.data.shards import open_tokens
from moh_llm.data.stream import SequenceStream
from moh_llm.data.tokenize import tokenize_mixture

ROOT = Path(__file__).resolve().parents[2]
TAB_D = {
    "redpajama_book": 4.24,
    "redpajama_wikipedia": 3.50,
    "redpajama_arxiv": 4.37,
    "redpajama_stackexchange": 3.19,
    "redpajama_c4": 10.94,
    "dolma": 61.28,
    "pile": 12.48,
}


@pytest.mark.slow
def test_shares_of_tab_d_hold_in_the_tokens_read(shared, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("CORPORA", str(shared / "data" / "corpora"))
    tokenize_mixture(load_mixture(ROOT / "data_mixtures" / "paper_local.yaml"), tokenizer, tmp_path / "tokens")
    sources = open_tokens(tmp_path / "tokens")
    assert {source.name: round(100 * source.weight, 6) for source in sources} == TAB_D
    blocks = SequenceStream(sources, 128, seed=11)
    counts = np.zeros(len(sources), dtype=int)
    for number in range(10_000):
        source, _ = blocks.locate(number)
        counts[source] += 1
        planned = np.array([s.weight for s in sources]) * (number + 1)
        assert np.abs(counts - planned).max() <= len(sources)
    assert np.abs(counts / 10_000 - np.array(list(TAB_D.values())) / 100).max() <= 0.001

    # What a block says it holds is there: its ids stand in a shard of its source, at a multiple of its length.
    draw = random.Random(0)
    for number in (draw.randrange(10**9) for _ in range(10)):
        source = blocks.locate(number)[0]
        ids = blocks.batch(number, 1)["input_ids"][0].numpy()
        whole = sources[source].train
        starts = range(0, len(whole) - 127, 128)
        assert any(whole.read(s, 1)[0][0] == ids[0] and np.array_equal(whole.read(s, 128)[0], ids) for s in starts)
