"""What a conversion read and measured."""

from moh_llm.records.conversion import Conversion, Parameters, Verification, distinct_ends


def heads_read(verification: Verification | None, heads: int, trained_since: bool = False) -> str | None:
    """Heads per token on the held-out text of the conversion, averaged over tokens and layers.

    Args:
        verification: what the conversion measured.
        heads: number of attention heads in a layer.
        trained_since: whether the model was trained after the conversion.
    """
    if verification is None or (read := verification.heads_read) is None:
        return None
    when = "As converted, before training, tokens" if trained_since else "Tokens"
    return (
        f"{when} of the conversion's held-out text had {read:.4g} of {heads} heads on ({read / heads:.1%}), averaged "
        "over layers."
    )


def calibration_text(conversion: Conversion) -> str:
    """The text that routers and fallbacks were fitted to, and the share of each source."""
    calibration = conversion.calibration
    if calibration is None:
        return "The conversion fitted nothing to text."
    read, total = calibration.tokens_of_source, max(1, calibration.tokens)
    names = distinct_ends(list(read))
    parts = [f"{name} ({count / total:.2%})" for name, count in zip(names, read.values(), strict=True)]
    return f"The conversion was fitted to {calibration.tokens:,} tokens from: {', '.join(parts)}."


def parameters_added(parameters: Parameters) -> str:
    """Number of weights of the base, and of those that the conversion adds."""
    added = f"{parameters.moh - parameters.dense:,} in routers and fallbacks"
    if parameters.routers is not None and parameters.fallbacks is not None:
        added = f"{parameters.routers:,} in routers, {parameters.fallbacks:,} in fallbacks"
    return f"{parameters.dense:,} of the base, {added}"


def conversion_took(conversion: Conversion) -> str:
    """Time and peak memory of a conversion."""
    return (
        f"{conversion.seconds:.1f} s, without the start of Python and its libraries, on {conversion.device}, in "
        f"{conversion.compute_dtype}, {conversion.peak_memory_mib} MiB at most"
    )
