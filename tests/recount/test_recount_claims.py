"""Every sentence of a model's card states the figures that were computed again, and no number is unknown."""

import pytest
from cards import check_card

import moh_llm
from moh_llm.claims import verdict
from moh_llm.hub.card import build_card
from moh_llm.records.evaluation import read_evaluation
from recount.claims import Facts, faults
from recount.models import KINDS, SEQUENCE, STEPS

QUICK = (("value", False), ("local", True))
STAGES = [
    pytest.param(kind, tuned, marks=[pytest.mark.slow] * ((kind, tuned) not in QUICK))
    for kind in KINDS
    for tuned in (False, True)
]


@pytest.mark.parametrize(("kind", "tuned"), STAGES)
@pytest.mark.usefixtures("one_thread")
def test_claims_state_what_is_so(kind, tuned, recount_of):
    found = recount_of(kind, report=tuned)
    card = build_card(found.tuned if tuned else found.converted, None, evaluation=found.report if tuned else None)
    (title, body), *sections = check_card(card).items()
    said = {title: body.partition("\n## ")[0], **dict(sections)}
    if tuned:  # the evaluation's own pages have it; the card leaves it out, since the suite is a smoke test
        said["Verdict"] = verdict(read_evaluation(found.report), "model", "This model")
    wrong = [*faults(said, Facts(found, tuned))]
    assert not wrong, "\n".join(wrong)


def test_a_tuned_model_that_is_converted_again_keeps_its_training(recount_of, tmp_path):
    model = recount_of("local")
    moh_llm.convert(model.tuned, output_dir=tmp_path / "again", preset="paper", heldout_tokens=0)
    card = (tmp_path / "again" / "README.md").read_text()
    tokens = STEPS * model.recipe["data"]["batch_size"] * SEQUENCE
    assert f"{tokens:,} training tokens in all" in card
    assert "No training since its conversion" in card and "How close the model is to its base is not on record" in card
    assert "what was done to the weights before" not in card and "No training run is on record" not in card
