"""What the record of a conversion says of the converted model's cost and of the text that it was fitted on."""

import math
from collections.abc import Mapping, Sequence

import torch

from moh_llm.conversion.base import BaseCheckpoint
from moh_llm.data.shards import TokenizedSource
from moh_llm.data.windows import window_counts
from moh_llm.flops import forward_flops, stated_lengths
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import Arithmetic, Calibration, ForwardFlops, Parameters
from moh_llm.records.tensors import HEAD, is_fallback_weight, read_headers


def arithmetic(
    config: MoHLlamaConfig, base: BaseCheckpoint, routing: Mapping[str, torch.Tensor], context: int
) -> Arithmetic:
    """Theoretical cost of the converted model beside its base's."""
    counted = dict(base.weight_map)
    if base.config.tie_word_embeddings:  # some files hold the embedding under this name, too
        counted.pop(HEAD, None)
    dense = sum(math.prod(shape) for _, _, shape in read_headers(base.folder, counted))
    fallbacks = sum(tensor.numel() for name, tensor in routing.items() if is_fallback_weight(name))
    routers = sum(tensor.numel() for tensor in routing.values()) - fallbacks
    flops = {}
    for length in stated_lengths(config, context):
        of_base, of_moh = forward_flops(config, length, dense=True), forward_flops(config, length)
        flops[str(length)] = ForwardFlops(dense=of_base, moh=of_moh, ratio=round(of_moh / of_base, 4))
    return Arithmetic(
        parameters=Parameters(dense=dense, moh=dense + routers + fallbacks, routers=routers, fallbacks=fallbacks),
        forward_flops=flops,
    )


def calibration_record(
    mixture: str,
    sources: Sequence[TokenizedSource],
    length: int,
    tokens: int,
) -> Calibration:
    """What was read of each source.

    Args:
        mixture: its name.
        sources: those that were read.
        length, tokens: of a window, and of how many in all calibration was asked for.
    """
    streams, shares = [source.train for source in sources], [source.weight for source in sources]
    windows = window_counts(streams, shares, length, tokens)
    names = _numbered([source.name for source in sources])
    read = {name: count * length for name, count in zip(names, windows, strict=True)}
    return Calibration(mixture=mixture, tokens=sum(read.values()), tokens_of_source=read)


def _numbered(names: Sequence[str]) -> list[str]:
    """The names, with a number at each that is there before."""
    found: list[str] = []
    for name in names:
        found.append(name if name not in found else f"{name} ({1 + names[: len(found)].count(name)})")
    return found
