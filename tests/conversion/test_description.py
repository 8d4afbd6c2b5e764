"""What the record of a conversion says of the text that it read and of the model's cost."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from moh_llm.conversion.convert import calibration_record
from moh_llm.data.shards import TokenizedSource, TokenStream
from moh_llm.data.windows import fixed_batches

LENGTH = 8


def source_of(name: str, weight: float, tokens: int, first: int) -> TokenizedSource:
    """A source of one document, whose ids begin at `first`."""
    stream = TokenStream.from_documents([np.arange(first, first + tokens)])
    return TokenizedSource(name, weight, stream, stream)


@pytest.mark.parametrize("weights", [(0.97, 0.03), (0.5, 0.5)])
def test_shares_are_those_of_the_tokens_that_were_read(weights: tuple[float, float]) -> None:
    """A source gives a window at least, and not more than it has: not what its weight says."""
    sources = [source_of("a", weights[0], 500, 1000), source_of("b", weights[1], 12, 5000)]
    record = calibration_record("mine", sources, LENGTH, 40)
    batches = fixed_batches([s.train for s in sources], weights, LENGTH, 40, 2)
    ids = np.concatenate([batch["input_ids"].flatten().numpy() for batch in batches])
    read = {"a": int((ids < 5000).sum()), "b": int((ids >= 5000).sum())}
    assert record.tokens_of_source == read and record.tokens == len(ids)
    assert read["b"] / len(ids) != pytest.approx(weights[1])


def test_cost_is_stated_at_the_context_and_by_part(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path: Path
) -> None:
    """At a context below the usual lengths, too; and no length is stated that the model cannot take."""
    base = make_llama(max_position_embeddings=600)
    assert convert(base, tmp_path / "moh", "--context", "96") == 0
    cost = json.loads((tmp_path / "moh" / "conversion.json").read_text())["arithmetic"]
    assert list(cost["forward_flops"]) == ["96", "512"]
    found = {"router": 0, "fallback": 0}
    for shard in (tmp_path / "moh").glob("*.safetensors"):
        with safe_open(shard, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                for kind in found:
                    found[kind] += file.get_tensor(name).size if f".self_attn.{kind}." in name else 0
    parameters = cost["parameters"]
    assert (parameters["routers"], parameters["fallbacks"]) == (found["router"], found["fallback"])
    assert parameters["moh"] == parameters["dense"] + sum(found.values()) and min(found.values()) > 0
