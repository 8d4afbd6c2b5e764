"""What a model costs, and what is not known of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.claims.claim import Claim, ModelRecords
from moh_llm.claims.heads import all_on, mean, plan_figures
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.evaluation import EvaluationRecord, ModelRecord, Row

FEWEST_ITEMS = 100  # of a benchmark whose score is a result


def theoretical_cost(config: MoHLlamaConfig) -> Claim:
    """What the table of FLOPs counts."""
    heads = f"{mean(config.active_heads_per_layer):.4g} of {config.num_attention_heads} heads are on"
    text = (
        "Theoretical FLOPs of one forward pass in which all that can be skipped of heads that are off is skipped; "
        f"keys, values and fallbacks are computed. {heads}, as the head plan asks for"
    )
    text += f"; the first {start:,} tokens read all keys in all heads." if (start := all_on(config)) else "."
    return Claim("theoretical_cost", plan_figures(config), text)


def measured_time(analysis: Mapping[str, Any], about: ModelRecord | None) -> Claim | None:
    """Time of a forward pass over that with every head on, at the lengths that were measured."""
    costs = analysis.get("seconds") or []
    if not costs or about is None:
        return None
    ratios = {cost["length"]: cost["moh"] / cost["dense"] for cost in costs}
    figures = {f"evaluation.analysis.seconds.{length}": ratio for length, ratio in ratios.items()}
    (first, ratio), *others = ratios.items()
    listed = [f"{ratio:.2f} times as long as with every head on at {first:,} tokens"]
    listed += [f"{ratio:.2f} at {length:,}" for length, ratio in others]
    text = (
        f"Measured: a forward pass takes {and_last(listed)} (random tokens, without a cache, on "
        f"{about.hardware or about.device}, in {about.dtype})."
    )
    return Claim("measured_time", figures, text)


def and_last(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def untimed(analysis: Mapping[str, Any]) -> Claim | None:
    """That no time was measured."""
    if analysis.get("seconds"):
        return None
    return Claim("untimed", {"evaluation.analysis.seconds": None}, "No time was measured on this model.")


def longest_text(records: ModelRecords) -> Claim:
    """How long a text the model can take, and how long were those that it was compared with its base on."""
    longest, compared = records.config.max_position_embeddings, []
    conversion, run = records.conversion, records.run
    if conversion and conversion.verification and conversion.plan and conversion.plan.context:
        compared.append(conversion.plan.context)
    if run and run.evaluation and run.evaluation.kl is not None:
        compared.append(records.recipe["data"]["sequence_length"])
    figures: dict[str, object] = {"config.max_position_embeddings": longest}
    text = f"Its config allows {longest:,} positions"
    if compared:
        figures["conversion.plan.context"] = max(compared)
        text += f"; it was compared with its reference on sequences of up to {max(compared):,} tokens"
    return Claim("longest_text", figures, f"{text}.")


def faults_of_the_base(base: str | None) -> Claim | None:
    """That the base's faults are the model's."""
    if base is None:
        return None
    text = f"The faults of its base, {base}, and the uses that {base} is not meant for, are this model's, too."
    return Claim("faults_of_the_base", {"conversion.base.name": base}, text)


def untuned(records: ModelRecords) -> Claim | None:
    """That nothing was trained after the conversion."""
    if records.conversion is None or records.trained_since or records.changed:
        return None
    text = "No training since its conversion is on record: it may lack what tuning gives back."
    return Claim("untuned", {"chain.runs": len(records.chain.runs)}, text)


def no_benchmark(evaluation: EvaluationRecord | None) -> Claim | None:
    """That no benchmark was run."""
    if evaluation is not None:
        return None
    return Claim("no_benchmark", {"evaluation": None}, "No benchmark was run on this model, of quality or of safety.")


def is_result(row: Row, record: EvaluationRecord) -> bool:
    """Whether scores of a benchmark are results: of all its items, and of `FEWEST_ITEMS` at least."""
    return record.limit is None and row.name not in record.partial_data and row.items_in_full >= FEWEST_ITEMS


def not_results(evaluation: EvaluationRecord | None, label: str) -> Claim | None:
    """The scores that are no results, and so not in the card's metadata."""
    if evaluation is None:
        return None
    rows = [row for row in evaluation.benchmarks if label in row.scores and not is_result(row, evaluation)]
    if not rows:
        return None
    items = {row.name: row.scores[label].items for row in rows}
    listed = ", ".join(f"{name} ({count:,} items)" for name, count in items.items())
    text = (
        "Left out of the card's model-index, because they cover only part of the items or fewer than "
        f"{FEWEST_ITEMS} items: {listed}."
    )
    return Claim("not_results", {"evaluation.benchmarks.items": items}, text)
