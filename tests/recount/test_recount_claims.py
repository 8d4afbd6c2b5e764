"""Every claim about a model states the figures that were computed again, and none is unknown."""

import pytest

import moh_llm
from moh_llm.claims import claims_of
from moh_llm.hub.card import model_records
from moh_llm.hub.evaluated import find_evaluated
from moh_llm.hub.lineage import read_lineage
from moh_llm.modeling import MoHLlamaConfig
from recount.claims import OF_A_CARD, ON_THEIR_OWN, Facts, makers
from recount.evaluation import Evaluation
from recount.leaves import differences
from recount.models import SEQUENCE, STEPS

QUICK = (("value", False), ("local", True))
STAGES = [
    pytest.param(kind, tuned, marks=[pytest.mark.slow] * ((kind, tuned) not in QUICK))
    for kind in ("value", "local", "paper")
    for tuned in (False, True)
]


@pytest.fixture
def records(kind, tuned, model_of, evaluation_of):
    """The records of the converted model, or of the tuned one with its run and its evaluation."""
    model = evaluation_of(kind).model if tuned else model_of(kind)
    folder = model.tuned if tuned else model.converted
    evaluated = find_evaluated(model.report, folder) if tuned else None
    return model_records(MoHLlamaConfig.from_pretrained(folder), read_lineage(folder), evaluated)


@pytest.fixture
def facts(tuned, kind, evaluation_of, run_of):
    return Facts(evaluation_of(kind) if tuned else Evaluation(run_of(kind)), tuned)


@pytest.mark.parametrize(("kind", "tuned"), STAGES)
@pytest.mark.usefixtures("one_thread")
def test_claims_state_what_is_so(records, facts):
    stated = {name: dict(claim.figures) for name, claim in claims_of(records).items()}
    stated |= {name: dict(claim.figures) for name, (make, _) in ON_THEIR_OWN.items() if (claim := make(records))}
    expected = {name: check(facts) for name, check in OF_A_CARD.items()}
    expected |= {name: check(facts) for name, (_, check) in ON_THEIR_OWN.items()}
    wrong = [*differences(stated, {name: figures for name, figures in expected.items() if figures is not None}, "")]
    assert not wrong, "\n".join(wrong)


def test_a_tuned_model_that_is_converted_again_keeps_its_training(model_of, tmp_path):
    model = model_of("local")
    moh_llm.convert(model.tuned, output=tmp_path / "again", preset="paper", heldout_tokens=0)
    config, lineage = MoHLlamaConfig.from_pretrained(tmp_path / "again"), read_lineage(tmp_path / "again")
    tokens = {"chain.tokens": STEPS * model.recipe["data"]["batch_size"] * SEQUENCE}
    expected = {"text_of_training": tokens, "trained_tokens": tokens, "untuned": {"chain.runs": 1}}
    expected |= {"not_proven": {"conversion": True}, "unrecorded_changes": None}
    stated = {name: claim.figures for name, claim in claims_of(model_records(config, lineage)).items()}
    assert {name: stated.get(name) for name in expected} == expected


def test_every_claim_has_a_checker():
    assert makers() == {*OF_A_CARD, *ON_THEIR_OWN}
