"""The text that conversion, training and scoring read, cut into documents. tests/data is about which text that is."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from moh_llm.data.shards import TokenizedSource, tokens_for

Row = list[tuple[int, np.ndarray]]  # of each document in a row of a batch: its number, and the ids of its tokens there


def read_sources(mixture: Path, tokenizer: Path) -> list[TokenizedSource]:
    """The sources of a mixture file, as tokens."""
    return tokens_for(str(mixture), AutoTokenizer.from_pretrained(tokenizer)).sources


def rows_of(batches: Iterable[dict[str, torch.Tensor]]) -> list[Row]:
    """The rows of batches; documents without numbers are all 0."""
    rows = []
    for batch in batches:
        numbers = batch.get("documents", torch.zeros_like(batch["input_ids"]))
        for parts in zip(batch["input_ids"], batch["position_ids"], numbers, strict=True):
            ids, positions, documents = (part.numpy() for part in parts)
            cuts = np.flatnonzero(positions == 0)[1:]
            rows.append(
                [(int(of[0]), own) for of, own in zip(np.split(documents, cuts), np.split(ids, cuts), strict=True)]
            )
    return rows
