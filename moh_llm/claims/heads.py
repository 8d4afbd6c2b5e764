"""How many heads tokens use: what the head plan asks for, and what was read on which text."""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.claims.claim import Claim
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import Verification
from moh_llm.records.run import LogLine


def heads_asked(config: MoHLlamaConfig) -> Claim:
    """Heads per token that the plan asks for, mean over layers, and which tokens it does not ask anything of."""
    asked, heads = mean(config.active_heads_per_layer), config.num_attention_heads
    text = f"The head plan asks for {asked:.4g} of {heads} heads per token ({asked / heads:.1%}), mean over layers"
    text += (
        f", after a document's first {start:,} tokens, which have all heads on." if (start := all_on(config)) else "."
    )
    return Claim("heads_asked", plan_figures(config), text)


def all_on(config: MoHLlamaConfig) -> int:
    """How many first tokens of a document have all heads on: some with local fallbacks, else none."""
    return config.all_heads_until if config.head_fallback == "local" else 0


def plan_figures(config: MoHLlamaConfig) -> dict[str, object]:
    """What sentences on the head plan state."""
    return {
        "config.num_active_heads": mean(config.active_heads_per_layer),
        "config.num_attention_heads": config.num_attention_heads,
        "config.all_heads_until": all_on(config),
    }


def heads_read(verification: Verification | None, heads: int, tuned: bool = False) -> Claim | None:
    """Heads per token on the text that the conversion held out, mean over layers and tokens.

    Args:
        verification: what the conversion measured.
        heads: of a layer.
        tuned: whether the model was trained after it.
    """
    if verification is None or (read := verification.heads_read) is None:
        return None
    when = "As converted, before training, tokens" if tuned else "Tokens"
    text = (
        f"{when} of the conversion's held-out text had {read:.4g} of {heads} heads on ({read / heads:.1%}), mean over "
    )
    text += "layers."
    return Claim("heads_read", {"conversion.verification.heads_read": read}, text)


def heads_read_on_prompts(analysis: Mapping[str, Any], heads: int) -> Claim | None:
    """Heads per token on the prompts of an evaluation's benchmarks, mean over layers and tokens."""
    if "head_load" not in analysis:
        return None
    read = mean_heads_on(analysis["head_load"]["load"])
    tokens = analysis["head_load"]["tokens"]
    text = (
        f"{tokens:,} tokens of the benchmarks' first prompts, each with the right choice where there are choices, had "
        f"{read:.4g} of {heads} heads on ({read / heads:.1%}), mean over layers."
    )
    figures = {"evaluation.analysis.head_load.load": read, "evaluation.analysis.head_load.tokens": tokens}
    return Claim("heads_read_on_prompts", figures, text)


def all_heads_on_prompts(analysis: Mapping[str, Any], label: str) -> Claim | None:
    """The benchmarks whose prompts are no longer than a document's first tokens, which have all heads on."""
    start, read = analysis.get("all_heads_until"), analysis.get("head_load_by_text")
    if not start or read is None:
        return None
    names = [name for name, load in read["load"].items() if min(load) == 1]
    if not names:
        return None
    figures = {f"analysis.{label}.all_heads_until": start, f"analysis.{label}.head_load_by_text.load": names}
    text = (
        f"In its last layer that chooses, {label} had all heads on for all tokens that were read of "
        f"{', '.join(names)}: a document's first {start:,} tokens have all on, so scores there say little of the head "
        "plan."
    )
    return Claim("all_heads_on_prompts", figures, text)


def heads_read_in_training(log: Sequence[LogLine], heads: int) -> Claim | None:
    """Heads per token on the held-out text of a training run when it was last scored, mean over layers and tokens."""
    line = next((line for line in reversed(log) if line.routing and line.routing.heads_read is not None), None)
    if line is None or line.routing is None or line.routing.heads_read is None:
        return None
    read = line.routing.heads_read
    text = (
        f"In training, after step {line.step:,}, tokens of the mixture's held-out text had {read:.4g} of {heads} heads "
    )
    text += f"on ({read / heads:.1%}), mean over layers."
    return Claim("heads_read_in_training", {"log.step": line.step, "log.routing.heads_read": read}, text)


def mean_heads_on(loads: Sequence[Sequence[float]]) -> float:
    """Heads that a token has on, mean over layers, of each layer's shares of tokens that have each head on."""
    return mean([sum(load) for load in loads])


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return sum(values) / len(values)
