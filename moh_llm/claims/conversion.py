"""What a conversion proved and read."""

from moh_llm.claims.claim import Claim, ModelRecords
from moh_llm.intervals import show_documents, show_interval
from moh_llm.records.conversion import Conversion, Parameters, Verification, distinct_ends
from moh_llm.records.lineage import in_words

_PROOF = "conversion.verification"


def all_heads_on(records: ModelRecords) -> Claim | None:
    """Whether the model with every head on is its base."""
    proof = records.conversion and records.conversion.verification
    if not proof:
        return None
    found = proof.all_heads_active
    figures: dict[str, object] = {
        f"{_PROOF}.all_heads_active.equals_base": found.equals_base,
        f"{_PROOF}.all_heads_active.tokens": found.tokens,
        f"{_PROOF}.dtype": proof.dtype,
    }
    if not found.equals_base:
        return Claim("all_heads_on", figures, "With every head on, the model did not equal its base when converted.")
    text = (
        "When the model was converted, each layer's output with every head on equalled the base's bit for bit, on "
        f"{found.tokens:,} tokens, in {proof.dtype}."
    )
    if records.trained_since:
        figures["chain.dense_kept"] = records.dense_kept
        text += " " + _after_training(records, figures)
    return Claim("all_heads_on", figures, text)


def _after_training(records: ModelRecords, figures: dict[str, object]) -> str:
    """Whether it holds of the tuned model; adds to the figures."""
    if records.dense_kept:
        return (
            "Training left the dense weights as the conversion wrote them (they have the same SHA-256), so it holds of "
            "this model, too."
        )
    scores = records.run and records.run.evaluation
    changed = "Training has since changed the dense weights"
    if records.dense_kept is None:
        changed = "The model has since been trained"
    if not scores or scores.all_heads is None:
        return f"{changed}; how far it is from its base with every head on was not measured."
    figures |= {"run.evaluation.all_heads.kl": scores.all_heads.kl, "run.evaluation.tokens": scores.tokens}
    return (
        f"{changed}: with every head on, the model now has a KL of {scores.all_heads.kl:#.3g} nats per token to "
        f"{in_words([records.reference])[0]}, on {scores.tokens:,} tokens of held-out text."
    )


def not_proven(records: ModelRecords) -> Claim | None:
    """Why there is no proof of the conversion."""
    conversion = records.conversion
    if conversion is not None and conversion.verification is not None:
        return None
    if why := records.changed or (conversion and conversion.set_aside):
        text = f"Not proven: the model is not what the records of its conversion describe ({why})."
    elif conversion is not None:
        text = "Not proven: the record of the conversion has no verification, so how near the model is to its base is "
        text += "not on record."
    elif records.from_scratch:
        text = "There was no conversion to prove: the model was trained from scratch."
    else:
        text = "Not proven: there is no record of a conversion."
    return Claim("not_proven", {"conversion": conversion is not None}, text)


def closeness_as_converted(verification: Verification | None, trained_since: bool) -> Claim | None:
    """The perplexity ratio of a model that was not trained since its conversion."""
    if verification is None or trained_since:
        return None
    ratio, bounds = verification.converted.perplexity_ratio, verification.converted.ratio_interval
    documents = verification.held_out_documents
    figures = {
        f"{_PROOF}.converted.perplexity_ratio": ratio,
        f"{_PROOF}.converted.ratio_interval": bounds,
        f"{_PROOF}.held_out_documents": documents,
    }
    text = f"As converted it has {ratio:.4f} times the perplexity of its base, on held-out text, "
    text += show_documents(documents) + (f" (95 % interval {show_interval(bounds, '.4f')})." if bounds else ".")
    return Claim("closeness_as_converted", figures, text)


def held_out_text(verification: Verification | None, trained_since: bool) -> Claim | None:
    """The text that the conversion was verified on."""
    if verification is None:
        return None
    tokens, documents, perplexity = (
        verification.held_out_tokens,
        verification.held_out_documents,
        verification.base_perplexity,
    )
    figures = {
        f"{_PROOF}.held_out_tokens": tokens,
        f"{_PROOF}.held_out_documents": documents,
        f"{_PROOF}.base_perplexity": perplexity,
    }
    when = "As converted, before it was trained" if trained_since else "As converted"
    text = f"{when}, on {tokens:,} tokens of held-out text ({show_documents(documents)}); the base's perplexity there "
    return Claim("held_out_text", figures, f"{text}is {perplexity:#.5g}.")


def calibration_text(conversion: Conversion | None, changed: str | None = None) -> Claim | None:
    """The text that was read to fit the conversion, and the share of each source; ``changed`` as in `ModelRecords`."""
    if conversion is None or conversion.set_aside or changed:
        return None
    calibration = conversion.calibration
    if calibration is None:
        return Claim("calibration_text", {}, "The conversion fitted nothing to text.")
    figures: dict[str, object] = {"conversion.calibration.tokens": calibration.tokens}
    read = calibration.tokens_of_source
    names = distinct_ends(list(calibration.sources if read is None else read))
    if read is None:  # an earlier version, which recorded weights
        parts = names
    else:
        figures["conversion.calibration.tokens_of_source"] = read
        shares = [count / max(1, calibration.tokens) for count in read.values()]
        parts = [f"{name} ({100 * share:.2f} %)" for name, share in zip(names, shares, strict=True)]
    text = f"The conversion was fitted on {calibration.tokens:,} tokens, read from: "
    return Claim("calibration_text", figures, f"{text}{', '.join(parts)}.")


def parameters_added(parameters: Parameters) -> Claim:
    """The weights that a conversion adds: those of routers and those of fallbacks."""
    figures = {f"conversion.arithmetic.parameters.{name}": value for name, value in parameters.content().items()}
    added = f"{parameters.moh - parameters.dense:,} of routers and fallbacks"
    if parameters.routers is not None and parameters.fallbacks is not None:
        added = f"{parameters.routers:,} of routers and {parameters.fallbacks:,} of fallbacks"
    return Claim("parameters_added", figures, f"{parameters.dense:,} of the base, {added}")


def conversion_took(conversion: Conversion) -> Claim:
    """How long the conversion took, and what memory."""
    figures = {
        "conversion.seconds": conversion.seconds,
        "conversion.device": conversion.device,
        "conversion.compute_dtype": conversion.compute_dtype,
        "conversion.peak_memory_mib": conversion.peak_memory_mib,
    }
    text = (
        f"{conversion.seconds:.1f} s, without the start of Python and its libraries, on {conversion.device}, in "
        f"{conversion.compute_dtype}, {conversion.peak_memory_mib} MiB at most"
    )
    return Claim("conversion_took", figures, text)
