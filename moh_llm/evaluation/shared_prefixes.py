"""Log-likelihoods of requests that begin alike: what they share is computed once.

Each of a subject's few-shot prompts begins with the same examples, which lm-eval computes anew for every prompt. Here
inputs are sorted by their tokens, and a cache of keys and values is cut back to what the next inputs share with it.
Inputs that share a prefix go through the model as a batch behind it, padded on the right; on a CPU, one by one. Passes
of other shapes round differently than lm-eval's do. One thing more differs: where requests have the same input but
continuations of different lengths, lm-eval scores the shorter one at wrong positions.
"""

import copy
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import log_softmax
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from moh_llm.errors import UserError

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""As lm-eval has it: context and continuation as text (None: not to be cached), then as tokens."""

_PASS = 512  # tokens; a pass of fewer saves less than it takes to read the weights and start the kernels


@dataclass(frozen=True)
class Input:
    """Input tokens of one or more requests."""

    tokens: tuple[int, ...]
    """Context and continuation without the last token, at most the model's context."""
    scored: int
    """At how many of the last positions logits are needed."""
    requests: list[int]
    """The requests' numbers."""

    @property
    def unscored(self) -> int:
        """How many tokens may come from a cache."""
        return len(self.tokens) - self.scored


def check_cache(model: PreTrainedModel) -> None:
    """Raise UserError for a model whose cache cannot be cut back: one with a sliding window, or a recurrent state."""
    known = inspect.signature(model.forward).parameters
    layers = DynamicCache(config=model.config).layers
    if {"past_key_values", "logits_to_keep"} <= known.keys() and all(type(layer) is DynamicLayer for layer in layers):
        return
    raise UserError(
        f"--share-prefixes needs a cache of keys and values that can be cut back to any length, and the one of a "
        f"{model.config.model_type} model cannot; leave --share-prefixes out"
    )


@torch.no_grad()
def score_sharing_prefixes(
    lm: "HFLM", requests: list[Request], batch_size: int | None = None, disable_tqdm: bool = False
) -> list[tuple[float, bool]]:
    """For each request the log-likelihood of its continuation (nats) and whether that is the likeliest.

    In place of lm-eval's `_loglikelihood_tokens`, with at most ``batch_size`` inputs in a pass (None: the
    model's). Raises ValueError for an empty context or continuation, and for a
    continuation longer than the model's context.
    """
    inputs = _build_inputs(requests, lm.max_length)
    cache, cached = DynamicCache(config=lm.model.config), ()
    answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    batch_size, done = batch_size or lm.batch_size, 0
    with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
        while done < len(inputs):
            first = inputs[done]
            kept = min(_common(cached, first.tokens), first.unscored)
            batch, shared = take_batch(inputs[done : done + batch_size], kept)
            for item, log_probs in zip(batch, _run(lm, batch, shared, kept, cache), strict=True):
                likeliest = log_probs.argmax(dim=-1)
                for number in item.requests:
                    text, _, continuation = requests[number]
                    target = torch.tensor(continuation, device=log_probs.device)
                    own, last = log_probs[-len(target) :], likeliest[-len(target) :]
                    # Summed in the type of the log-probabilities, as lm-eval does.
                    total = own.gather(1, target[:, None]).sum()
                    answers[number] = float(total), bool((last == target).all())
                    if text is not None:
                        lm.cache_hook.add_partial("loglikelihood", text, answers[number])
                bar.update(len(item.requests))
            cached = first.tokens[: cache.get_seq_length()]
            done += len(batch)
    return answers


def take_batch(inputs: list[Input], kept: int) -> tuple[list[Input], int]:
    """The first inputs that go through the model together, and how many of their tokens come from the cache.

    An input that shares less with the first one than the cache does (``kept`` tokens), or than half of what the first
    two share, begins the next batch: it would make the others compute again what they have in common.
    """
    first, shared, least, count = inputs[0], inputs[0].unscored, kept, 1
    for item in inputs[1:]:
        common = min(shared, _common(first.tokens, item.tokens), item.unscored)
        if common < least:
            break
        if count == 1:
            least = max(kept, common // 2)
        shared, count = common, count + 1
    # A pass over what is shared must save tokens.
    return inputs[:count], shared if (count - 1) * (shared - kept) >= _PASS else kept


def _build_inputs(requests: list[Request], max_length: int) -> list[Input]:
    """The inputs of ``requests``, each once, sorted by their tokens."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
        if not context or not 0 < len(continuation) <= max_length:
            raise ValueError(
                f"a context of {len(context)} and a continuation of {len(continuation)} tokens cannot be scored "
                f"by a model of {max_length} tokens"
            )
        tokens = tuple((context + continuation)[-(max_length + 1) : -1])
        numbers.setdefault(tokens, []).append(number)
    return [
        Input(tokens, max(len(requests[number][2]) for number in numbers[tokens]), numbers[tokens])
        for tokens in sorted(numbers)
    ]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens ``a`` and ``b`` begin with in common."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _run(lm: "HFLM", batch: list[Input], shared: int, kept: int, cache: DynamicCache) -> list[torch.Tensor]:
    """Log-probabilities `[scored, V]` of each input of a batch.

    The cache is cut to ``kept`` tokens and grows to the ``shared`` ones, or to all tokens of a single input.
    """
    options: dict[str, Any] = {"dtype": torch.long, "device": lm.device}
    cache.crop(kept - cache.get_seq_length())  # a negative number removes tokens from the end
    if shared > kept:
        prefix = torch.tensor([batch[0].tokens[kept:shared]], **options)
        lm.model(input_ids=prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
    lengths = [len(item.tokens) - shared for item in batch]
    longest = max(lengths)
    rest = torch.zeros(len(batch), longest, **options)
    for row, item, length in zip(rest, batch, lengths, strict=True):
        row[:length] = torch.tensor(item.tokens[shared:], **options)
    scored = max(longest - length + item.scored for item, length in zip(batch, lengths, strict=True))
    branch = cache if len(batch) == 1 else _branch(cache, len(batch))
    logits = lm.model(input_ids=rest, past_key_values=branch, use_cache=True, logits_to_keep=scored).logits
    ends = [scored - longest + length for length in lengths]
    return [
        log_softmax(row[end - item.scored : end], dim=-1, dtype=lm.softmax_dtype)
        for row, item, end in zip(logits, batch, ends, strict=True)
    ]


def _branch(cache: DynamicCache, count: int) -> DynamicCache:
    """A cache that goes on from ``cache`` with ``count`` sequences and leaves it as it is."""
    branch = copy.copy(cache)
    # A layer that grows makes new tensors, so views are enough.
    branch.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in branch.layers:
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys.expand(count, -1, -1, -1), layer.values.expand(count, -1, -1, -1)
    return branch
