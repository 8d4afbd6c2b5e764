"""The benchmark of needles: what a prompt's answer scores, and which heads it would need."""

import copy
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import needles

from moh_llm.modeling import MoHLlamaForCausalLM


def test_scores_are_those_of_a_whole_pass_and_heads_are_turned_on(make_llama, convert, tmp_path, capsys):
    base = make_llama(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    flags = ["--keys", "0.4", "--heldout-tokens", "0", "--context", "64", "--local-window", "4", "--local-start", "0"]
    assert convert(base, tmp_path / "moh", *flags, "--calibration-tokens", "1024") == 0
    dense = AutoModelForCausalLM.from_pretrained(base).eval()
    model = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh").eval()
    with torch.inference_mode():
        check(dense, model, capsys)


def check(dense: PreTrainedModel, model: MoHLlamaForCausalLM, capsys: pytest.CaptureFixture) -> None:
    ids = torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(1))
    prompt = tuple(ids.split([48, 8, 4], 1))
    expected = dense(ids).logits.log_softmax(-1)[0, torch.arange(55, 59), ids[0, 56:]].sum().item()
    assert needles.score(dense, prompt).nats == pytest.approx(expected, abs=1e-5)

    assert not needles.score(dense, prompt).solved
    likely = dense(ids[:, :56]).logits[:, -1:].argmax(-1)  # the first token of an answer that is
    assert needles.score(dense, (*prompt[:2], likely)).solved
    assert not needles.score(dense, (*prompt[:2], torch.cat([likely, ids[:, 57:58]], 1))).solved

    cache = model(prompt[0], use_cache=True).past_key_values
    own = needles.score(model, prompt, cache).nats
    assert own == pytest.approx(needles.score(model, prompt).nats, abs=1e-5) != pytest.approx(expected, abs=1e-3)
    heads = [(layer, head) for layer, router in enumerate(model.routers) for head in range(4)]
    with needles.heads_on(model, heads):
        assert needles.score(model, prompt).nats == pytest.approx(expected, abs=1e-5)
        for_answer = needles.score(model, prompt, cache).nats
    assert needles.score(model, prompt, cache).nats == own  # heads and cache are as before

    needles.look(model, prompt)
    said = capsys.readouterr().out
    assert f"from the question on {for_answer:.3f}" in said
    assert re.search(rf"the best 16 of \d: {re.escape(f'{for_answer - own:+.3f}')}$", said, re.M)  # all that are off

    text, question = prompt[:2]
    later = copy.deepcopy(cache)
    model(question[:, :-1], past_key_values=later)
    own = model.generate(ids[:, :56], max_new_tokens=3, do_sample=False, pad_token_id=0)[:, 56:]
    with model.all_heads_active():
        ways = own, most_likely(model, question, cache), most_likely(model, question[:, -1:], later)
    answers = [tuple(way[0].tolist()) for way in ways]
    assert len({*answers}) == 3
    tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids.tolist())), eos_token_id=0)
    for way, answer in enumerate(ways):
        found = needles.answers(model, (text, question, answer), tokenizer, 3)
        assert found == tuple(other == way for other in range(3))


def most_likely(model: MoHLlamaForCausalLM, begun: torch.Tensor, cache: Cache) -> torch.Tensor:
    """The three most likely next tokens `[1, 3]`, each by a pass of its own."""
    given = [begun]
    for _ in range(3):
        logits = model(torch.cat(given, 1), past_key_values=copy.deepcopy(cache)).logits
        given.append(logits[:, -1:].argmax(-1))
    return torch.cat(given[1:], 1)
