"""All claims of a model's card."""

from moh_llm.claims.claim import Claim, ModelRecords
from moh_llm.claims.conversion import all_heads_on, calibration_text, closeness_as_converted, held_out_text, not_proven
from moh_llm.claims.evaluation import verdict, warnings
from moh_llm.claims.heads import heads_asked, heads_read, heads_read_in_training, heads_read_on_prompts
from moh_llm.claims.limits import (
    faults_of_the_base,
    longest_text,
    measured_time,
    no_benchmark,
    not_results,
    theoretical_cost,
    untimed,
    untuned,
)
from moh_llm.claims.training import (
    closeness_tuned,
    other_text_may_differ,
    text_of_training,
    trained_tokens,
    unfinished,
    unrecorded_changes,
)


def origin(records: ModelRecords) -> Claim:
    """What the model was made of."""
    conversion = records.conversion
    if conversion is not None:
        name = conversion.base.label
        return Claim("origin", {"conversion.base.name": name}, f"A Mixture-of-Head model made from {name}.")
    how = " trained from scratch" if records.from_scratch else ""
    return Claim("origin", {"conversion": None}, f"A Mixture-of-Head model{how}.")


def claims_of(records: ModelRecords) -> dict[str, Claim]:
    """The claims that the records support, by name, in the order of the card; a name's second one is numbered."""
    config, conversion, evaluation = records.config, records.conversion, records.evaluation
    heads, since = config.num_attention_heads, records.trained_since
    verification = conversion and conversion.verification
    analysis = evaluation.analysis.get(records.label, {}) if evaluation else {}
    about = evaluation.models[records.label] if evaluation else None
    found = [
        origin(records),
        heads_asked(config),
        heads_read(verification, heads, since),
        heads_read_in_training(records.log, heads),
        heads_read_on_prompts(analysis, heads),
        closeness_tuned(records),
        closeness_as_converted(verification, since),
        verdict(evaluation, records.label, "This model") if evaluation else None,
        all_heads_on(records),
        held_out_text(verification, since),
        not_proven(records),
        trained_tokens(records.chain),
        unrecorded_changes(records.chain, conversion is not None),
        text_of_training(records),
        calibration_text(conversion, records.changed),
        unfinished(records.run),
        *(warnings(evaluation) if evaluation else []),
        not_results(evaluation, records.label),
        theoretical_cost(config),
        measured_time(analysis, about),
        untimed(analysis),
        faults_of_the_base(conversion and conversion.base.label),
        untuned(records),
        other_text_may_differ(records.run),
        no_benchmark(evaluation),
        longest_text(records),
    ]
    claims: dict[str, Claim] = {}
    for claim in found:
        if claim is not None:
            same = sum(name.partition(" ")[0] == claim.name for name in claims)
            claims[f"{claim.name} {same + 1}" if same else claim.name] = claim
    return claims
