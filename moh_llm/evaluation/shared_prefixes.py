"""Log-likelihoods of requests that begin alike: what they share is computed once.

Each of a subject's few-shot prompts begins with the same examples, which lm-eval computes anew for every prompt. Here
inputs are sorted by their tokens, and a cache of keys and values goes with them: cut back to what the next inputs share
with it, never computed twice. Inputs that share a prefix go through the model as a batch behind it, padded on the
right. A batch takes one more as long as this adds fewer tokens than a pass of its own is worth; on a CPU most batches
are of one. Passes of other shapes round differently than lm-eval's do. One thing more differs: where requests have the
same input but continuations of different lengths, lm-eval scores the shorter one at wrong positions.
"""

import copy
import inspect
import itertools
import logging
from collections.abc import Iterator
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

# What a pass costs besides its tokens, in tokens: reading the weights and starting the kernels.
_CPU_PASS = 16
_GPU_PASS = 512


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


@dataclass(frozen=True)
class Step:
    """Cut the cache to ``kept`` tokens, lengthen it to ``shared``, then run what ``inputs`` have behind these.

    The cache ends with the ``shared`` tokens, or after a single input with all of its tokens.
    """

    inputs: list[Input]
    kept: int
    shared: int


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
def score_sharing_prefixes(lm: "HFLM", requests: list[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
    """For each request the log-likelihood of its continuation (nats) and whether that is the likeliest.

    In place of lm-eval's `_loglikelihood_tokens`, with at most ``lm.batch_size`` inputs in a pass. Raises ValueError
    for an empty context or continuation, and for a continuation longer than the model's context.
    """
    inputs = _build_inputs(requests, lm.max_length)
    cache = DynamicCache(config=lm.model.config)
    answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
        for step in plan(inputs, lm.batch_size, _CPU_PASS if lm.device.type == "cpu" else _GPU_PASS):
            for item, log_probs in zip(step.inputs, _run(lm, step, cache), strict=True):
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
    return answers


def plan(inputs: list[Input], batch_size: int, pass_tokens: int) -> Iterator[Step]:
    """The passes for sorted ``inputs``; ``pass_tokens`` is what a pass costs besides its tokens, in tokens."""
    # How many tokens each input shares with the next one. Over a range of sorted inputs the least of them is shared.
    alike = [_common(a.tokens, b.tokens) for a, b in itertools.pairwise(inputs)] + [0]
    start = held = 0
    while start < len(inputs):
        first = inputs[start]
        kept = min(held, alike[start - 1], first.unscored)
        end, shared = start + 1, first.unscored
        while end < len(inputs) and end - start < batch_size:
            count, common = end - start, min(shared, alike[end - 1], inputs[end].unscored)
            # What a single input does not share with another is no loss, but for what it has from the cache.
            lost = count * max(0, (kept if count == 1 else shared) - common)
            lengths = [len(item.tokens) for item in inputs[start : end + 1]]
            padding = (count + 1) * max(lengths) - count * max(lengths[:-1]) - lengths[-1]
            if lost + padding > pass_tokens:
                break
            end, shared = end + 1, common
        batch = inputs[start:end]
        if len(batch) == 1:
            shared, held = kept, len(first.tokens)
        else:
            kept = min(kept, shared)
            # A forward pass for the prefix alone must save tokens, also those of the inputs that follow.
            users = end
            while (users - start - 1) * (shared - kept) <= pass_tokens and alike[users - 1] >= shared > kept:
                users += 1
            if (users - start - 1) * (shared - kept) <= pass_tokens:
                shared = kept
            held = shared
        yield Step(batch, kept, shared)
        start = end


def _build_inputs(requests: list[Request], max_length: int) -> list[Input]:
    """The inputs of ``requests``, each once, sorted by their tokens."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
        if not context or not 0 < len(continuation) <= max_length:
            raise ValueError(
                f"a context of {len(context)} and a continuation of {len(continuation)} tokens cannot be scored "
                f"by a model of {max_length} tokens"
            )
        length = len(context) + len(continuation)
        if length > max_length + 1:
            # lm-eval's own message under its own name, which `scoring` looks for.
            logging.getLogger("lm_eval.models.huggingface").warning(
                f"Combined length of context ({len(context)}) and continuation ({len(continuation)}) exceeds model's "
                f"maximum length ({max_length}). Truncating {length - max_length + 1} tokens from the left."
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


def _run(lm: "HFLM", step: Step, cache: DynamicCache) -> list[torch.Tensor]:
    """Log-probabilities `[scored, V]` of each input of a step; ``cache`` is left as the step says."""
    options: dict[str, Any] = {"dtype": torch.long, "device": lm.device}
    cache.crop(step.kept - cache.get_seq_length())  # a negative number: so many off its end
    if step.shared > step.kept:
        prefix = torch.tensor([step.inputs[0].tokens[step.kept : step.shared]], **options)
        lm.model(input_ids=prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
    lengths = [len(item.tokens) - step.shared for item in step.inputs]
    longest = max(lengths)
    rest = torch.zeros(len(lengths), longest, **options)
    for row, item, length in zip(rest, step.inputs, lengths, strict=True):
        row[:length] = torch.tensor(item.tokens[step.shared :], **options)
    kept = max(longest - length + item.scored for item, length in zip(step.inputs, lengths, strict=True))
    branch = cache if len(lengths) == 1 else _branch(cache, len(lengths))
    logits = lm.model(input_ids=rest, past_key_values=branch, use_cache=True, logits_to_keep=kept).logits
    ends = [kept - longest + length for length in lengths]
    return [
        log_softmax(of_one[end - item.scored : end], dim=-1, dtype=lm.softmax_dtype)
        for of_one, item, end in zip(logits, step.inputs, ends, strict=True)
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
