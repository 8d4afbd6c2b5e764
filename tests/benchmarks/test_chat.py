"""The benchmark of conversations."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import chat

from moh_llm.data.tokenizer import TextTokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[assistant]{% endif %}"
TURNS, CHATS = 4, 5


def test_the_figures_are_those_of_answers_and_passkeys(make_llama, convert, river, tmp_path, monkeypatch, capsys):
    base = make_llama(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, max_position_embeddings=1024)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    flags = ["--num-active-heads", "3", "--heldout-tokens", "0", "--context", "64", "--local-window", "4"]
    flags += ["--local-start", "0", "--calibration", str(river), "--calibration-tokens", "1024"]
    assert convert(base, tmp_path / "moh", *flags) == 0
    texts = ["no question", "Q: " + "too long " * 30 + "\n\nA: no", "Q: without an answer"]
    texts += [f"Q: Why {n}?\n\nA: That is a long answer.\n\nA: So {n}." for n in range(TURNS * CHATS)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer, dense = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base).eval()
    made, make = [], chat.conversation

    @torch.inference_mode()
    def with_a_passkey_that_the_base_finds(*args):
        made.append(make(*args))
        for at in (made[-1][2] == 2).nonzero()[:, 0].tolist() if len(made) == CHATS + 1 else ():
            made[-1][0][at] = dense(made[-1][0][None, :at]).logits[0, -1].argmax()
        return made[-1]

    monkeypatch.setattr(chat, "conversation", with_a_passkey_that_the_base_finds)
    monkeypatch.setattr(chat, "GROUPS", ((1, 1), (2, 2), (3, 3), (4, 4)))
    chat.conversations([str(tmp_path / "text.jsonl")], TextTokenizer.from_tokenizer(tokenizer), CHATS)
    ids, turn, passkey = made[1]
    assert [tokenizer.decode(ids[turn == n]) for n in (1, 2, 3, 4)] == [f"So {n}.[/]" for n in (4, 5, 6, 7)]
    for number, name in enumerate(chat.NAMES, start=1):
        fact = f"The pass key of {name} is {tokenizer.decode(ids[passkey == number])}."
        assert tokenizer.decode(ids).split("[user]")[number].startswith(f"{fact} Remember it.\nWhy {number + 3}?")

    words = ["chat.py", str(tmp_path / "moh"), "--base", str(base), "--text", str(tmp_path / "text.jsonl")]
    rows, read = [], chat.read
    monkeypatch.setattr(chat, "read", lambda *given: rows.append(read(*given)) or rows[-1])
    monkeypatch.setattr(sys, "argv", [*words, "--conversations", str(CHATS)])
    capsys.readouterr()
    assert chat.main() == 0
    assert f"{CHATS} conversations of {TURNS} turns" in capsys.readouterr().out
    ids, turn, _ = made[CHATS]
    assert [row["base"]["right"] for row in rows] == [[False, True, False, False]] + [[False] * 4] * (CHATS - 1)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "moh").eval()
        p, q = (one(ids[None]).logits[0].log_softmax(-1) for one in (model, dense))
    kl = (q.exp() * (q - p)).sum(-1)[:-1]
    for number, sums in enumerate(rows[0][str(tmp_path / "moh")]["sums"], start=1):
        assert sums[0] == (turn == number).sum()
        assert sums[3] == pytest.approx(kl[turn[1:] == number].sum().item(), rel=1e-3) != 0
    assert 0 < rows[0][str(tmp_path / "moh")]["keys"] < 1

    monkeypatch.setattr(sys, "argv", [*words, "--conversations", "9"])
    assert chat.main() == 1
    assert "error: 20 questions and answers of at most 80 tokens in " in capsys.readouterr().err
