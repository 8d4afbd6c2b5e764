"""What prompts begin with in common is computed once, and the likelihoods are lm-eval's own."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moh_llm.errors import UserError

pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM

from moh_llm.evaluation import shared_prefixes
from moh_llm.evaluation.language_model import LanguageModel, load_model
from moh_llm.evaluation.processes import Team
from moh_llm.evaluation.shared_prefixes import score_sharing_prefixes

CONTEXT = 160


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_moh", "paper_moh"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    """A dense model, its default conversion and the paper's, with a short context, which share prefixes."""
    folder = request.getfixturevalue(request.param)
    lm = LanguageModel(str(folder), 4, Team(), None, True, device="cpu", dtype="float32", max_length=CONTEXT)
    assert lm.max_length == CONTEXT
    return lm


@pytest.fixture(scope="module")
def requests_and_answers(lm: LanguageModel) -> tuple[list[Any], list[Any]]:
    """Requests of every kind, some with the continuation that the model would choose, and lm-eval's answers."""
    requests = make_requests()
    requests += [likeliest(lm, request) for request in requests if len(request[2]) < 10][::3]
    # One at a time: of requests with the same input that are cut in different places, lm-eval scores one wrongly.
    return requests, [HFLM._loglikelihood_tokens(lm, [request], disable_tqdm=True)[0] for request in requests]


@pytest.fixture
def tokens_read(lm: LanguageModel) -> Iterator[list[int]]:
    """How many tokens, padding and all, each pass from here on puts through the model."""
    read: list[int] = []
    hook = lm.model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: read.append(inputs[0].numel()))
    yield read
    hook.remove()


def make_requests() -> list[Any]:
    """Requests as lm-eval makes them, of every kind, in no order."""
    draw = random.Random(0)

    def words(length: int) -> list[int]:
        return [draw.randrange(3, 60) for _ in range(length)]

    pairs: list[tuple[list[int], list[int]]] = []
    for _ in range(3):  # subjects: examples, questions, one-token choices
        examples = words(100)
        for length in (5, 9, 20, 6, 30):
            question = words(length)
            pairs += [(examples + question, [choice]) for choice in (10, 11, 12, 13)]
    context = words(40)
    pairs += [(context, words(length)) for length in (1, 3, 7, 7)]  # choices of several tokens
    pairs += [(context[:cut], context[cut : cut + 5]) for cut in (1, 2, 20, 30)]  # one within the other
    pairs += [(context[:30], context[30:35])]  # again
    pairs += [(context[:33], context[33:35])]  # the same input, cut elsewhere
    pairs += [(words(CONTEXT + extra), words(4)) for extra in (-4, -3, -2, 0, 50)]  # up to and beyond the context
    pairs += [([5], words(CONTEXT)), (words(3), [7])]
    draw.shuffle(pairs)
    return [((f"context {n}", f"continuation {n}"), *pair) for n, pair in enumerate(pairs)]


def likeliest(lm: LanguageModel, request: Any) -> Any:
    """The request with the continuation that the model would choose."""
    text, context, continuation = request
    chosen: list[int] = []
    for _ in continuation:
        logits = lm.model(torch.tensor([(context + chosen)[-CONTEXT:]]), use_cache=False).logits
        chosen.append(int(logits[0, -1].argmax()))
    return text, context, chosen


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "pass_tokens"), [(1, 512), (4, 0), (64, 10**6)])
def test_likelihoods_are_lm_evals(
    lm: LanguageModel,
    requests_and_answers: tuple[list[Any], list[Any]],
    batch_size: int,
    pass_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, expected = requests_and_answers
    monkeypatch.setattr(shared_prefixes, "_PASS", pass_tokens)
    found = score_sharing_prefixes(lm, requests, batch_size, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert 10 < sum(greedy for _, greedy in found) < len(found)
    assert all(type(value) is float and type(greedy) is bool for value, greedy in found)
    assert lm._loglikelihood_tokens([], disable_tqdm=True) == []


@pytest.mark.parametrize("batch_size", [1, 8])
def test_what_is_shared_is_read_once(
    lm: LanguageModel, tokens_read: list[int], batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples, questions, length = [list(range(3, 60)) * 2, list(range(60, 3, -1)) * 2], 20, 8
    requests = [
        (("", ""), shown + [3 + n] * length, [choice])
        for shown in examples
        for n in range(questions)
        for choice in (10, 11, 12, 13)
    ]
    score_sharing_prefixes(lm, requests, batch_size, disable_tqdm=True)
    at_least = sum(len(shown) for shown in examples) + len(examples) * questions * length
    assert at_least <= sum(tokens_read) <= 1.3 * at_least
    shared = sum(tokens_read)
    tokens_read.clear()
    HFLM._loglikelihood_tokens(lm, requests, disable_tqdm=True)
    assert sum(tokens_read) > 5 * shared


def test_a_sliding_window_is_refused(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(make_llama()).save_pretrained(tmp_path)
    load_model(str(tmp_path), 1, "auto", "cpu", Team())
    with pytest.raises(UserError, match=r"the one of a mistral model cannot; leave --share-prefixes out"):
        load_model(str(tmp_path), 1, "auto", "cpu", Team(), share_prefixes=True)
