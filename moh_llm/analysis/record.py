"""All analyses of one model on named texts, such as benchmarks, as one record ready for JSON.

    record = analyse(model, tokenizer, {"SciQ": ["Who wrote ...", ...], "PIQA": [...]})

Its parts are what the other modules return, as plain lists and numbers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from moh_llm.analysis.cost import flops_by_length, seconds_by_length
from moh_llm.analysis.features import feature_rank, similarity_table
from moh_llm.analysis.heads import head_load, token_heads
from moh_llm.analysis.scores import QUANTILES, LayerScores, routing_scores
from moh_llm.analysis.watch import last_routed_layer
from moh_llm.attention import choose_for
from moh_llm.data.shards import Shard, TokenStream
from moh_llm.data.windows import fixed_batches, stack, window
from moh_llm.errors import UserError
from moh_llm.metrics import Batch
from moh_llm.modeling import MoHLlamaForCausalLM

SENTENCE = "When the rain stopped, Anna counted 12 boats on the river and asked why none of them had moved."
LENGTHS = tuple(2**n for n in range(7, 18))  # tokens: 128 to 131,072
BINS = 20  # of the histograms in the record: finer ones would be most of it
_ROW = 512  # tokens
_ROWS = 4  # of a batch
_COSTLY_TOKENS = 2048  # of all texts together, where attention weights are computed
_LONGEST_TIMED = 8192  # tokens
_SLOW = 5.0  # seconds of all forward passes of a length, after which no longer one is timed
_REPEATS = 3


@dataclass(frozen=True)
class _Counted:
    """Batches that move a bar by their tokens."""

    batches: Sequence[Batch]
    bar: tqdm

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield batch
            self.bar.update(batch["input_ids"].numel())


def analyse(
    model: MoHLlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Sequence[str]],
    sentence: str = SENTENCE,
    tokens_per_text: int = 1024,
    lengths: Sequence[int] = LENGTHS,
) -> dict[str, Any]:
    """Results of all functions of this package, by name.

    Of each text the first `tokens_per_text` tokens are read, in rows of 512 or of the model's context,
    each document isolated; a document that is longer than a row loses its beginning. Similarity,
    which is costly, takes equal parts of the texts, about 2,048 tokens in all, and states how many.

    Args:
        model: a MoH model in evaluation mode, where it lies, as it is set.
        tokenizer: its tokenizer; it adds its special tokens to each document.
        texts: documents by the name of their text.
        sentence: what `token_heads` shows.
        tokens_per_text: the most that is read of a text.
        lengths: in tokens, for the cost. FLOPs leave out those beyond the model's context, measured
            seconds those beyond 8,192 and beyond the first whose passes take more than 5 s together, too.

    A bar shows the stage, and the tokens of all passes that are done.

    Raises:
        UserError: a model that is not MoH or has no routed heads, a text without tokens, or a model
            that does not compute finite numbers.
    """
    if not isinstance(model, MoHLlamaForCausalLM):
        raise UserError(f"a {type(model).__name__} has no heads to choose among: only MoH models are analysed")
    last = last_routed_layer(model)  # before anything slow; in a layer without routed heads all loads are 1
    context = model.config.max_position_embeddings
    row = min(_ROW, context)

    streams = {name: _read(tokenizer, documents, row, tokens_per_text) for name, documents in texts.items()}
    share = max(1, _COSTLY_TOKENS // max(1, len(texts)))
    few = [batch for stream in streams.values() for batch in _batches(_first(stream, share), row)]
    costly = sum(batch["input_ids"].numel() for batch in few)
    lengths = [length for length in lengths if length <= context]
    timed = [length for length in lengths if length <= _LONGEST_TIMED]

    record: dict[str, Any] = {
        "texts": {name: len(stream) for name, stream in streams.items()},
        "layers": len(model.routers),
        "heads": model.config.num_attention_heads,
        "num_shared": [router.num_shared for router in model.routers],
        "num_active": [router.num_active for router in model.routers],
        # Of a document: the loads below count them.
        "all_heads_until": model.config.all_heads_until if model.config.head_fallback == "local" else 0,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention_backend": choose_for(model.device, model.dtype, model.config.head_dim).name,
    }
    tokens = 5 * sum(record["texts"].values()) + 2 * costly + 2 * (1 + _REPEATS) * sum(timed)
    # Not disabled: `moh_llm.evaluate` disables the bars of lm-eval.
    with tqdm(total=tokens, unit="token", unit_scale=True, disable=False) as bar:
        batches = {name: _Counted(_batches(stream, row), bar) for name, stream in streams.items()}
        everything = _Counted([batch for text in batches.values() for batch in text.batches], bar)

        bar.set_description("head load", refresh=False)
        record["head_load"] = asdict(head_load(model, everything))
        loads = {name: head_load(model, text) for name, text in batches.items()}
        record["head_load_by_text"] = {
            "layer": last,
            "shared_heads": record["head_load"]["shared_heads"][last],
            "tokens": {name: load.tokens for name, load in loads.items()},
            "load": {name: load.load[last] for name, load in loads.items()},
            "balance": {name: load.balance[last] for name, load in loads.items()},
        }
        bar.set_description("routing scores", refresh=False)
        layers = [_coarse(layer) for layer in routing_scores(model, everything)]
        record["routing_scores"] = _finite({"quantiles": list(QUANTILES), "bins": BINS, "layers": layers})
        coarse = {name: _coarse(routing_scores(model, text)[last]) for name, text in batches.items()}
        record["routing_scores_by_text"] = _finite({"layer": last, "texts": coarse})
        record["token_heads"] = {"text": sentence, **asdict(token_heads(model, tokenizer, sentence))}
        bar.set_description("similarity of heads", refresh=False)
        table = {which: asdict(found) for which, found in similarity_table(model, _Counted(few, bar)).items()}
        record["similarity"] = _finite({"tokens": costly, **table})
        bar.set_description("feature rank", refresh=False)
        record["feature_rank"] = asdict(feature_rank(model, everything))
        bar.set_description("cost by length", refresh=False)
        record["flops"] = [asdict(cost) for cost in flops_by_length(model.config, lengths)]
        seconds = seconds_by_length(model, timed, _REPEATS, _SLOW, bar.update)
        record["seconds"] = [asdict(cost) for cost in seconds]
        bar.set_description("analysis", refresh=False)
    return record


def _read(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], row: int, tokens: int) -> TokenStream:
    """The first `tokens` tokens of some documents, of each of them at most its last `row`."""
    pieces: list[np.ndarray] = []
    for document in documents:
        if sum(map(len, pieces)) >= tokens:
            break
        # Not verbose: it would warn of documents that are longer than the context.
        ids = tokenizer(document, verbose=False)["input_ids"]
        # The end holds the question, and the beginning of the next row would lack its context.
        pieces.append(np.array(ids[-row:], dtype=np.int64))
    return _first(TokenStream.of([Shard.of(pieces)]), tokens)


def _first(stream: TokenStream, tokens: int) -> TokenStream:
    return stream.part(0, min(tokens, len(stream)))


def _batches(stream: TokenStream, row: int) -> list[Batch]:
    """A whole stream as rows of `row` tokens, and what is left over as one shorter row."""
    batches = fixed_batches([stream], [1.0], row, len(stream), _ROWS)
    rest = len(stream) % row
    return [*batches, stack([window(stream, len(stream) - rest, rest)], rest)] if rest else batches


def _coarse(layer: LayerScores) -> dict[str, Any]:
    """A layer's distributions with histograms of `BINS` bins."""
    found = asdict(layer)
    for distribution in filter(None, found.values()):
        fine = distribution["histogram"]
        width = len(fine) // BINS
        distribution["histogram"] = [sum(fine[first : first + width]) for first in range(0, len(fine), width)]
    return found


def _finite(part: dict[str, Any]) -> dict[str, Any]:
    """A part of the record, which JSON has signs for. Raises UserError for NaN or infinity in it."""
    try:
        json.dumps(part, allow_nan=False)
    except ValueError as error:
        raise UserError("the model's heads do not give finite numbers; dtype float32 may help") from error
    return part
