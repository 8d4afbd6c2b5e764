"""What was done to the weights, and how near the tuned model is to its reference."""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.claims.claim import Claim, ModelRecords
from moh_llm.intervals import show_documents, show_figure, show_interval
from moh_llm.records.lineage import REFERENCES, Chain, ConversionEntry, ReferenceKind, RunEntry, in_words, mixture_name
from moh_llm.records.run import LogLine, RunRecord, Scores

ROUTING = ("routers", "fallbacks")


def closeness_tuned(records: ModelRecords) -> Claim | None:
    """The perplexity ratio of a tuned model, as it was saved."""
    scores = records.run and records.run.evaluation
    if not scores or not scores.reference_perplexity:
        return None
    ratio, bounds, runs = (
        scores.perplexity / scores.reference_perplexity,
        scores.ratio_interval,
        len(records.chain.runs),
    )
    tokens = records.chain.tokens or tokens_read(records.log)
    figures: dict[str, object] = {
        "run.evaluation.perplexity": scores.perplexity,
        "run.evaluation.reference_perplexity": scores.reference_perplexity,
        "run.evaluation.ratio_interval": bounds,
        "run.evaluation.documents": scores.documents,
        "chain.tokens": tokens,
    }
    other = "its base" if records.reference == "base" else REFERENCES["start"]
    text = f"Tuned on {tokens:,} tokens{f' in {runs} runs' if runs > 1 else ''}, it has {ratio:.4f} times the "
    text += f"perplexity of {other}, on held-out text, {show_documents(scores.documents)}"
    text += f" (95 % interval {show_interval(bounds, '.4f')})." if bounds else "."
    return Claim("closeness_tuned", figures, text)


def tokens_read(log: Sequence[LogLine]) -> int:
    """Training tokens up to the last line of a log."""
    return (log[-1].tokens or 0) if log else 0


def trained_tokens(chain: Chain) -> Claim | None:
    """Training tokens of all runs of a lineage."""
    if not chain.runs:
        return None
    return Claim("trained_tokens", {"chain.tokens": chain.tokens}, f"{chain.tokens:,} training tokens in all.")


def unrecorded_changes(chain: Chain, converted: bool) -> Claim | None:
    """The gaps of a lineage; ``converted``: whether the model has the record of a conversion."""
    gaps, entries = chain.unrecorded(), chain.entries
    if converted and entries and isinstance(entries[0], RunEntry):
        gaps = [0, *gaps]  # a chain that begins with a run is that of a model from scratch, or lacks what came before
    if not gaps:
        return None
    names = entry_names(chain)
    lines = [f"What was done to the weights before {names[gap]} is not on record in full." for gap in gaps]
    return Claim("unrecorded_changes", {"chain.unrecorded": gaps}, " ".join(lines))


def entry_names(chain: Chain) -> list[str]:
    """What to call each entry of a lineage: runs are numbered."""
    names, number = [], 0
    for entry in chain.entries:
        number += isinstance(entry, RunEntry)
        names.append("conversion" if isinstance(entry, ConversionEntry) else f"run {number}")
    return names


def weights_changed(entry: RunEntry, parameters: Mapping[str, int] | None = None) -> Claim:
    """Which weights a run changed, by their hashes before and after.

    Args:
        entry: of the lineage, whose hashes take routers and fallbacks together.
        parameters: `RunRecord.parameters` of the run, if it is at hand: what was not trained has not changed.
    """
    figures = {
        f"chain.entries.{when}.{part}": getattr(getattr(entry, when), part)
        for when in ("began_with", "made")
        for part in ("dense", "routing")
    }
    by_lora = f" (by LoRA of rank {entry.lora_rank})" if entry.lora_rank is not None else ""
    trained = {kind: count for kind in ROUTING if (count := (parameters or {}).get(f"trained_{kind}")) is not None}
    figures |= {f"run.parameters.trained_{kind}": count for kind, count in trained.items()}
    routing = " or ".join(kind for kind in ROUTING if trained.get(kind)) or " or ".join(ROUTING)
    parts = {"dense": f"dense weights{by_lora}", "routing": routing}
    changed = [name for part, name in parts.items() if getattr(entry.began_with, part) != getattr(entry.made, part)]
    return Claim("weights_changed", figures, f"changed: {' and '.join(changed) or 'nothing'}")


def weights_trained(parameters: Mapping[str, int] | None, recipe: Mapping[str, Any]) -> Claim:
    """Which weights a run trained: those that had a gradient.

    Args:
        parameters: `RunRecord.parameters`; earlier versions did not record kinds.
        recipe: names rank and precision of adapters.
    """
    names = {"base": "the dense model", "adapters": "adapters", "routers": "routers", "fallbacks": "fallbacks"}
    counts = {kind: (parameters or {}).get(f"trained_{kind}") for kind in names}
    figures = {f"run.parameters.trained_{kind}": count for kind, count in counts.items() if count is not None}
    if not figures:
        text = "not on record by kind"
    else:
        text = ", ".join(f"{count:,} of {names[kind]}" for kind, count in counts.items() if count) or "none"
    if (lora := recipe.get("lora")) is not None:
        base = f" on weights in {recipe['quantization']}" if recipe.get("quantization") else ""
        text += f" (LoRA of rank {lora['rank']}{base}, merged)"
    return Claim("weights_trained", figures, text)


def text_of_training(records: ModelRecords) -> Claim:
    """The text that a model was trained on, as far as it is on record."""
    run, chain = records.run, records.chain
    if run is not None:
        tokens, data = tokens_read(records.log), records.recipe["data"]
        figures: dict[str, object] = {"log.tokens": tokens, "recipe.data.sequence_length": data["sequence_length"]}
        text = (
            f"{'In the last run ' if len(chain.runs) > 1 else ''}{tokens:,} tokens of the mixture "
            f"{mixture_name(run.mixture, data['mixture'])}, in sequences of {data['sequence_length']:,} tokens of one "
            "source."
        )
        return Claim("text_of_training", figures, text)
    if chain.runs:
        text = (
            f"{chain.tokens:,} tokens in all, by the lineage, which names each run's mixture. The record of what was "
            "read of each source does not lie beside the model."
        )
        return Claim("text_of_training", {"chain.tokens": chain.tokens}, text)
    if records.changed:
        text = "What it was trained on is not known: the records in its folder do not describe this model."
        return Claim("text_of_training", {}, text)
    text = "No training run is on record."
    if records.dense_of_base:
        text += " The dense weights are those of the base (they have the same SHA-256): none was trained since."
    return Claim("text_of_training", {"chain.runs": 0, "chain.dense_of_base": records.dense_of_base}, text)


def unfinished(run: RunRecord | None) -> Claim | None:
    """That a run has not finished."""
    if run is None or run.status == "finished":
        return None
    text = "The run has not finished, or was stopped before its end."
    return Claim("unfinished", {"run.status": run.status}, text)


def held_out_scores(scores: Scores) -> Claim:
    """Scores on held-out text, as a clause for a line of the terminal."""
    text = (
        f"perplexity {scores.perplexity:.3f} on {scores.tokens} held-out tokens of {show_documents(scores.documents)}"
    )
    if scores.reference is not None:
        kl = show_figure(scores.kl, scores.kl_interval, ".4f")
        text += f"; {REFERENCES[scores.reference]}: {scores.reference_perplexity:.3f}, KL to it {kl}"
    if scores.all_heads is not None:
        text += f", with all heads on {scores.all_heads.kl:.4f}"
    if scores.floor is not None:
        text += f", and {scores.floor:.2g} with every head on before training"
    return Claim("held_out_scores", {"validation": scores.content()}, text)


def scored_text(scores: Scores) -> Claim:
    """The text that a run was scored on."""
    text = (
        f"Scored on {scores.tokens:,} tokens of text that the same mixture holds out, with the plan's numbers of heads."
    )
    return Claim("scored_text", {"validation.tokens": scores.tokens}, text)


def floor_of_kl(floor: float | None) -> Claim | None:
    """The KL before the first step with all heads on."""
    if floor is None:
        return None
    text = "Before the first step, with every head on, the KL was "
    if floor == 0:
        text += "exactly 0."
    else:
        text += f"{floor:#.2g}, from the different precisions of the two models; a lower KL cannot be expected."
    return Claim("floor_of_kl", {"validation.floor": floor}, text)


def saved_model(scores: Scores | None, reference: ReferenceKind) -> Claim | None:
    """How the saved model was scored, and how far it is from its reference with every head on."""
    if scores is None:
        return None
    figures: dict[str, object] = {}
    lines, other = [], in_words([reference])[0]
    if scores.kl is not None and scores.dtype:
        figures["run.evaluation.dtype"] = scores.dtype
        lines.append(f"The saved model and {other} were scored in {scores.dtype}.")
    if scores.all_heads is not None:
        figures["run.evaluation.all_heads.kl"] = scores.all_heads.kl
        kl = f"{scores.all_heads.kl:#.3g}" if scores.all_heads.kl else "exactly 0"
        lines.append(f"With every head on, the saved model has a KL of {kl} to {other}.")
    return Claim("saved_model", figures, " ".join(lines)) if lines else None


def other_text_may_differ(run: RunRecord | None) -> Claim | None:
    """That held-out text is of the mixture that was trained on."""
    if run is None or run.evaluation is None:
        return None
    text = "Held-out text is of the mixture that it was trained on; the model may do worse on other text and in other "
    text += "languages."
    return Claim("other_text_may_differ", {"run.evaluation.tokens": run.evaluation.tokens}, text)
