"""How much text each step of the quick start reads, so that all steps end within the given minutes.

Two numbers are measured: the seconds per token of a forward pass of the base, and of the gradient by its inputs. A step
takes a number of such passes over its tokens, plus a fixed time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from moh_llm.conversion.layers import LayerwiseModel, run_layer
from moh_llm.data.mixture import EMBEDDED
from moh_llm.devices import synchronize
from moh_llm.intervals import LEAST as DOCUMENTS

CONTEXTS = (8192, 4096, 2048, 1024, 512, 256)  # tokens per sequence, of which the longest that the time allows
SEQUENCES = 2  # in a step of tuning
LEAST = {
    "calibration": 1536,
    "heldout": 1280,
    "tuning": 1024,
}  # tokens of the smallest run
_MOST = 24576  # tokens of calibration and of held-out text; the rest of the time goes to tuning
SOURCES = len(EMBEDDED.sources)  # each gives at least one sequence
BENCHMARKS = (14, 10, 6)  # items of the benchmarks of the suite `smoke`
_LEAST_ITEMS = 2  # of each benchmark
_ITEM_TOKENS = 400  # per item: both models read it with all answers, and so does the analysis of the heads
# Seconds beside the passes over text, on two cores of an AMD EPYC with AVX2: starting, reading and writing models,
# hashes, tokenising all of the text once, charts.
FIXED = {"convert": 9.0, "tune": 24.0, "evaluate": 19.0, "compare": 12.0}
_CALIBRATION = 1.15  # fits and samples of attention, beside the two sweeps
_SLACK = 0.9  # share of the time that is planned


@dataclass(frozen=True)
class Speed:
    """Seconds per token of the base on this device.

    Attributes:
        forward: of a forward pass, the vocabulary's logits included.
        backward: of the gradient by the inputs, beside it.
    """

    forward: float
    backward: float


@dataclass(frozen=True)
class Amounts:
    """What the quick start reads.

    Attributes:
        context: tokens in a sequence.
        calibration, heldout, tuning: tokens.
        items: of each benchmark.
    """

    context: int
    calibration: int
    heldout: int
    tuning: int
    items: int = max(BENCHMARKS)

    def seconds(self, speed: Speed) -> dict[str, float]:
        """Estimate of each step."""
        forward, both = speed.forward, speed.forward + speed.backward
        verified = SOURCES * self.context
        passes = {
            "convert": _CALIBRATION * self.calibration * (forward + both) + 2.2 * forward * verified,
            # The base is the teacher, and the saved model is scored against it, as planned and with all heads on.
            "tune": self.tuning * (forward + 1.2 * both) + 4.4 * forward * verified,
            "evaluate": forward * _ITEM_TOKENS * sum(min(count, self.items) for count in BENCHMARKS),
            "compare": 3.3 * forward * self.heldout + 2.2 * forward * self.context,
        }
        return {step: FIXED[step] + passes[step] for step in FIXED}

    @property
    def steps(self) -> int:
        """Steps of tuning."""
        return self.tuning // (SEQUENCES * self.context)


def choose_amounts(speed: Speed, seconds: float, positions: int) -> Amounts:
    """The longest context, at most `positions`, and the most text that fit into `seconds`; else the least of both."""
    contexts = dict.fromkeys(min(context, positions) for context in CONTEXTS)
    tried = [
        replace(_least(context), items=items) for context in contexts for items in (max(BENCHMARKS), min(BENCHMARKS))
    ]
    tried.append(replace(tried[-1], items=_LEAST_ITEMS))
    found = next((amounts for amounts in tried if sum(amounts.seconds(speed).values()) <= _SLACK * seconds), tried[-1])
    while (larger := _scaled(found, 1.25)) != found and sum(larger.seconds(speed).values()) <= _SLACK * seconds:
        found = larger
    return found


def fit_rest(amounts: Amounts, speed: Speed, seconds: float, steps: Sequence[str]) -> Amounts:
    """The amounts reduced until the given steps take `seconds`: first tuning, then held-out text, then items."""
    least = replace(_least(amounts.context), items=_LEAST_ITEMS)
    # A shorter interval is worth no delay.
    least = replace(least, heldout=min(least.heldout, SOURCES * amounts.context))
    parts = {"heldout": amounts.context, "items": 1}
    parts = {"tuning": SEQUENCES * amounts.context} | parts if "tune" in steps else parts
    for name, part in parts.items():
        while getattr(amounts, name) > getattr(least, name):
            estimate = amounts.seconds(speed)
            if sum(estimate[step] for step in steps) <= _SLACK * seconds:
                return amounts
            amounts = replace(amounts, **{name: max(getattr(least, name), getattr(amounts, name) - part)})
    return amounts


def measure_speed(base: LayerwiseModel, tokens: int | None = None) -> Speed:
    """Time one layer and the head of the base on random tokens, the fastest of three runs each."""
    # On an accelerator fewer tokens would time its launches.
    tokens = tokens or (256 if base.device.type == "cpu" else 2048)
    ids = torch.randint(0, base.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(tokens)[None]
    (states,) = base.embed([ids])
    layer, head = base.layer(0), base.head()
    states.requires_grad_(True)

    def forward() -> torch.Tensor:
        return run_layer(layer, states, positions)

    def backward() -> torch.Tensor:
        return torch.autograd.grad(forward().sum(), states)[0]

    with torch.no_grad():
        of_layer, of_head = _least_seconds(forward, base.device), _least_seconds(lambda: head(states), base.device)
    of_both = _least_seconds(backward, base.device)
    layers = len(base)
    return Speed(
        (layers * of_layer + of_head) / tokens, (layers * max(of_both - of_layer, of_layer / 2) + of_head) / tokens
    )


def _least(context: int) -> Amounts:
    counts = {"calibration": SOURCES, "heldout": DOCUMENTS, "tuning": 2 * SEQUENCES}
    return Amounts(context, **{name: max(LEAST[name], counts[name] * context) for name in counts})


def _scaled(amounts: Amounts, scale: float) -> Amounts:
    """The amounts with `scale` times the text, and at least one sequence more."""

    def windows(tokens: int, length: int) -> int:
        return max(tokens + length, int(scale * tokens // length) * length)

    return replace(
        amounts,
        calibration=max(amounts.calibration, min(windows(amounts.calibration, amounts.context), _MOST)),
        heldout=max(amounts.heldout, min(windows(amounts.heldout, amounts.context), _MOST)),
        tuning=windows(amounts.tuning, SEQUENCES * amounts.context),
    )


def _least_seconds(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
