"""What a run trained, and how close the tuned model is to its reference."""

from collections.abc import Mapping
from typing import Any

from moh_llm.intervals import show_documents, show_figure
from moh_llm.records.conversion import REFERENCES, ReferenceKind, in_words
from moh_llm.records.run import Scores


def weights_trained(parameters: Mapping[str, int] | None, recipe: Mapping[str, Any]) -> str:
    """Which weights a run trained, by kind.

    Args:
        parameters: `RunRecord.parameters`; earlier versions did not record kinds.
        recipe: has the rank and the precision of adapters.
    """
    names = {"base": "the dense model", "adapters": "adapters", "routers": "routers", "fallbacks": "fallbacks"}
    counts = {kind: (parameters or {}).get(f"trained_{kind}") for kind in names}
    if all(count is None for count in counts.values()):
        text = "not on record by kind"
    else:
        text = ", ".join(f"{count:,} of {names[kind]}" for kind, count in counts.items() if count) or "none"
    if (lora := recipe.get("lora")) is not None:
        base = f" on weights in {recipe['quantization']}" if recipe.get("quantization") else ""
        text += f" (LoRA of rank {lora['rank']}{base}, merged)"
    return text


def held_out_scores(scores: Scores) -> str:
    """Scores on held-out text, as a clause for a line of the terminal."""
    text = (
        f"perplexity {scores.perplexity:.3f} on {scores.tokens} held-out tokens of {show_documents(scores.documents)}"
    )
    if scores.reference is not None:
        kl = show_figure(scores.kl, scores.kl_interval, ".4f")
        text += f"; {REFERENCES[scores.reference]}: {scores.reference_perplexity:.3f}, KL to it {kl}"
    if scores.all_heads_kl is not None:
        text += f", with all heads on {scores.all_heads_kl:.4f}"
    return text


def scored_text(scores: Scores) -> str:
    """The text that a run was scored on."""
    return f"Scored on {scores.tokens:,} tokens of text held out from the same mixture, with the head plan's budget."


def saved_model(scores: Scores | None, reference: ReferenceKind) -> str | None:
    """The dtype that the saved model was scored in, and its KL to the reference with every head on."""
    lines, other = [], in_words([reference])[0]
    if scores and scores.kl is not None and scores.dtype:
        lines.append(f"The saved model and {other} were scored in {scores.dtype}.")
    if scores and scores.all_heads_kl is not None:
        kl = f"{scores.all_heads_kl:#.3g}" if scores.all_heads_kl else "exactly 0"
        lines.append(f"With every head on, the saved model has a KL of {kl} to {other}.")
    return " ".join(lines) or None
