"""All claims of a model's card."""

from moh_llm.claims.claim import Claim, ModelRecords
from moh_llm.claims.heads import heads_asked, heads_read, heads_read_on_prompts


def claims_of(records: ModelRecords) -> dict[str, Claim]:
    """The claims that the records support, by name, in the order of the card."""
    config, conversion, evaluation = records.config, records.conversion, records.evaluation
    heads = config.num_attention_heads
    verification = conversion and conversion.verification
    tuned = records.run is not None or bool(records.chain.runs)
    analysis = evaluation.analysis.get(records.label, {}) if evaluation else {}
    found = [
        heads_asked(config),
        heads_read(verification, heads, tuned),
        heads_read_on_prompts(analysis, heads),
    ]
    return {claim.name: claim for claim in found if claim is not None}
