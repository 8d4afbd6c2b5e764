"""Pictures of a model's heads: their figures against loops over tokens and heads, and what the page holds."""

import re
from pathlib import Path

import pytest
import torch

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.evaluation.charts import HeatMap
from moh_llm.evaluation.inspection import inspect_model
from moh_llm.flops import keys_read

CHARTS = ("heads", "layers", "tokens", "keys")
TEXT = "The river <b>was high</b> that spring, and the boats lay tied to the poplars below the mill. " * 2


def test_figures_are_those_of_a_loop(tiny_moh: Path) -> None:
    from transformers import AutoTokenizer

    from moh_llm.modeling import MoHLlamaForCausalLM

    found = inspect_model(str(tiny_moh), TEXT)
    model, tokenizer = MoHLlamaForCausalLM.from_pretrained(tiny_moh), AutoTokenizer.from_pretrained(tiny_moh)
    ids, gates = tokenizer(TEXT, return_tensors="pt")["input_ids"], []
    for router in model.routers:
        router.register_forward_hook(lambda module, inputs, output: gates.append(output[1][0].ne(0)))
    model(ids)
    tokens, config = ids.shape[1], model.config
    layers, along, alone, keys = found.charts
    assert tokens > 128 and along.width == 2  # drawn as the means of two tokens

    after = [gate[config.all_heads_until :].float().mean(0) for gate in gates]
    torch.testing.assert_close(torch.tensor(layers.rows), torch.stack(after))
    read = []
    for token in range(tokens):
        near = {*range(config.local_sinks), *range(token + 1 - config.local_window, token + 1)} & {*range(token + 1)}
        on = [bool(gate[token, head]) for gate in gates for head in range(config.num_attention_heads)]
        all_on = token < config.all_heads_until
        read.append(sum(token + 1 if one or all_on else len(near) for one in on) / len(on))
    every, own = keys.series["all heads"], keys.series["this model"]
    assert every == [(token + 1, token + 1) for token in range(0, tokens, 2)]
    assert [keys for _, keys in own] == pytest.approx(read[::2])
    told, share = dict(found.table.rows), sum(read) / (tokens * (tokens + 1) / 2)
    assert told["keys read"] == f"{share:.1%} of the base's; planned {keys_read(config, tokens):.1%}"
    every_token, late = torch.stack(gates).sum(2), slice(config.all_heads_until, None)
    on, after_first = every_token.double().mean(), every_token[:, late].double().mean()
    first = f"; after the first {config.all_heads_until} tokens {after_first:.4g}"
    assert told["heads on"] == f"{on:.4g} of {config.num_attention_heads}{first}"
    assert told["planned"].startswith(f"{sum(config.active_heads_per_layer) / len(gates):.4g} of ")
    for gate, row in zip(gates, along.rows, strict=True):
        assert row[-1] == pytest.approx(gate[2 * (len(row) - 1) :].float().mean().item())
    layer = int(re.search(r"\d+", alone.title)[0])
    assert alone.rows[3][40] == pytest.approx(gates[layer][80:82, 3].float().mean().item())
    assert "".join(token for token, _ in found.text).endswith(TEXT)
    assert found.text[100][1] == pytest.approx(torch.stack(gates)[:, 100].float().mean().item())


def test_the_command_writes_a_page_or_pictures(tiny_moh: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["inspect", str(tiny_moh), "--text", str(tmp_path / "text.txt"), "--output"]
    assert main([*words, str(tmp_path / "heads.html")]) == 0
    page = (tmp_path / "heads.html").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"picture: file://{tmp_path}/heads.html"
    assert "<script" not in page and "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    text = page[page.index('<p class="text">') :]
    assert "<b>" not in text and "&lt;" in text and text.count("<span") > 128
    assert main([*words, str(tmp_path / "x.png")]) == 0
    assert {path.name for path in tmp_path.glob("x*")} == {f"x-{chart}.png" for chart in CHARTS}
    assert main([*words, str(tmp_path / "x.pdf")]) == 2 and "must end in .html or .png" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "none" / "x.png")]) == 2 and "there is no folder" in capsys.readouterr().err


def test_a_picture_is_a_png(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # charts are rendered
    chart = HeatMap("a", "A title", "", [[0.0, 1.0]], ("token", "layer"), "share")
    assert chart.png.startswith(b"\x89PNG") and chart.svg.count("A title") == 1  # the page has it as a caption


@pytest.mark.slow  # its text is tokenised
def test_without_a_text_the_built_in_one_is_read(paper_moh: Path) -> None:
    assert dict(inspect_model(str(paper_moh)).table.rows)["text"] == "512 tokens"


def test_a_model_without_heads_to_switch_off_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UserError, match="has no heads that can be off"):
        inspect_model(str(tiny_llama))


def test_characters_of_several_tokens_are_whole(tiny_moh: Path) -> None:
    text = "The café, 日本 and 😀 \ufffd are here."
    assert "".join(piece for piece, _ in inspect_model(str(tiny_moh), text).text).endswith(text)
