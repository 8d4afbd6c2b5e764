"""What a pass that scores says of held-out text, against the comparison that conversion and benchmarks make."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moh_llm.data.mixture import load_mixture
from moh_llm.data.sample import sample_mixture
from moh_llm.data.windows import validation_batches
from moh_llm.metrics import compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.training.beginning import Reference
from moh_llm.training.config import ObjectiveConfig
from moh_llm.training.passes import evaluate
from moh_llm.training.step import TrainingStep


def test_scores_are_those_of_the_comparison(model_folder: Path, mixture_file: Path) -> None:
    student, teacher = (MoHLlamaForCausalLM.from_pretrained(model_folder).eval() for _ in range(2))
    teacher.set_active_heads(teacher.config.num_attention_heads)
    sources = sample_mixture(load_mixture(mixture_file), AutoTokenizer.from_pretrained(model_folder))
    batches = validation_batches(sources, 32, 512, 2)
    wanted = compare_to_reference({"": logits_of(student)}, logits_of(teacher), batches)[""]
    scores, _ = evaluate(None, TrainingStep(student, teacher, ObjectiveConfig(), Reference("start", own=True)), batches)
    assert (scores["tokens"], scores["documents"]) == (wanted.tokens, wanted.documents)
    assert wanted.documents > 4 and wanted.kl > 0
    for key in ("perplexity", "reference_perplexity", "kl", "top1_agreement", "ratio_interval", "kl_interval"):
        assert scores[key] == pytest.approx(getattr(wanted, key), rel=1e-4), key
    alone, _ = evaluate(None, TrainingStep(student, None, ObjectiveConfig(kind="cross_entropy")), batches)
    assert alone == {key: scores[key] for key in ("tokens", "documents", "perplexity")}
