"""How much text each step of the quick start reads, so that all steps end within the minutes that the user gave.

Two numbers are measured: the seconds per token of a forward pass of the base, and of the gradient by its inputs. What a
step takes is a number of such passes over its tokens, plus what it takes for no text at all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moh_llm.conversion.layers import LayerwiseModel, run_layer
from moh_llm.data.mixture import EMBEDDED
from moh_llm.devices import synchronize
from moh_llm.intervals import LEAST as DOCUMENTS

CONTEXTS = (8192, 4096, 2048, 1024, 512, 256)  # tokens in a sequence; the longest is taken that the time allows
SEQUENCES = 2  # in a step of tuning
LEAST = {"calibration": 1536, "heldout": 1280, "tuning": 1024}  # tokens of the smallest run, or 3, 5 and 4 sequences
_MOST = 24576  # tokens of calibration and of held-out text; what time is left goes to tuning
SOURCES = len(EMBEDDED.sources)  # each gives a sequence at least
BENCHMARKS = (14, 10, 6)  # items of those of the suite `smoke`
_LEAST_ITEMS = 2  # of each
_ITEM_TOKENS = 400  # read of an item: by two models with all answers, and by the analysis of the heads
# Seconds that steps take beside their passes over text, on two cores of an AMD EPYC with AVX2: starting, reading and
# writing models, hashes, tokenising all of the text once, charts.
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
        """What each step is estimated to take."""
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
    """The longest context, and the most text, whose steps take about `seconds`; the least where none does.

    Args:
        speed: of the base.
        seconds: that the steps may take.
        positions: that the base was made for.
    """
    contexts = dict.fromkeys(min(context, positions) for context in CONTEXTS)
    tried = [
        replace(_least(context), items=items) for context in contexts for items in (max(BENCHMARKS), min(BENCHMARKS))
    ]
    tried.append(replace(tried[-1], items=_LEAST_ITEMS))
    found = next((amounts for amounts in tried if _total(amounts, speed) <= _SLACK * seconds), tried[-1])
    while (larger := _scaled(found, 1.25)) != found and _total(larger, speed) <= _SLACK * seconds:
        found = larger
    return found


def fit_rest(amounts: Amounts, speed: Speed, seconds: float) -> Amounts:
    """The amounts with as much tuning and held-out text as what follows the conversion takes in `seconds`."""

    def fits(tried: Amounts) -> bool:
        return _total(tried, speed) - tried.seconds(speed)["convert"] <= _SLACK * seconds

    least, step = _least(amounts.context), SEQUENCES * amounts.context
    least = replace(least, heldout=min(least.heldout, SOURCES * amounts.context))  # an interval is worth no delay
    while not fits(amounts) and amounts.tuning > least.tuning:
        amounts = replace(amounts, tuning=max(least.tuning, amounts.tuning - step))
    while not fits(amounts) and amounts.heldout > least.heldout:
        amounts = replace(amounts, heldout=max(least.heldout, amounts.heldout - amounts.context))
    return amounts


def fit_items(amounts: Amounts, speed: Speed, seconds: float) -> Amounts:
    """The amounts with as many benchmark items as are scored, with the step after it, in `seconds`."""
    for items in range(amounts.items, _LEAST_ITEMS, -1):
        found = replace(amounts, items=items)
        estimate = found.seconds(speed)
        if estimate["evaluate"] + estimate["compare"] <= _SLACK * seconds:
            return found
    return replace(amounts, items=_LEAST_ITEMS)


def measure_speed(base: LayerwiseModel, tokens: int | None = None) -> Speed:
    """Time one layer and the head of the base on random tokens, each three times; the least counts.

    256 tokens by default on a CPU, and 2,048 on an accelerator, where fewer would time its launches.
    """
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
    """The amounts with about that times the text, and a sequence more at least."""

    def windows(tokens: int, length: int) -> int:
        return max(tokens + length, int(scale * tokens // length) * length)

    return replace(
        amounts,
        calibration=max(amounts.calibration, min(windows(amounts.calibration, amounts.context), _MOST)),
        heldout=max(amounts.heldout, min(windows(amounts.heldout, amounts.context), _MOST)),
        tuning=windows(amounts.tuning, SEQUENCES * amounts.context),
    )


def _total(amounts: Amounts, speed: Speed) -> float:
    return sum(amounts.seconds(speed).values())


def _least_seconds(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
