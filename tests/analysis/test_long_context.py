"""The long-context benchmark: its figures against naive ones, and that it goes on where it stopped."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm import attention
from moh_llm.flops import forward_flops
from moh_llm.modeling import MoHLlamaForCausalLM, attention_moh
from moh_llm.modeling.interval_attention_moh import masked_attention

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import long_context
from baselines.pressed import press_prompt, read_later, read_pressed


@pytest.fixture(scope="module")
def folders(make_llama, convert, tmp_path_factory):
    base, moh = make_llama(), tmp_path_factory.mktemp("moh") / "local"
    flags = ["--fallback", "local", "--local-window", "8", "--num-active-heads", "2", "--heldout-tokens", "0"]
    assert convert(base, moh, *flags) == 0
    return base, moh


def test_figures_are_those_of_a_naive_loop(folders, monkeypatch):
    monkeypatch.setattr(long_context, "EDGES", (0, 30, 70, 8192))
    monkeypatch.setattr(long_context, "HEADLINE", 50)
    base, moh = (
        LlamaForCausalLM.from_pretrained(folders[0]).eval(),
        MoHLlamaForCausalLM.from_pretrained(folders[1]).eval(),
    )
    ids = torch.randint(3, 200, (90,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = long_context.compare(base, {"moh": moh}, ids, None)["moh"]
        p, q = (model(ids[None], use_cache=False).logits[0].double().log_softmax(-1) for model in (moh, base))
    kl = [sum(float(b.exp() * (b - a)) for a, b in zip(p[t], q[t], strict=True)) for t in range(89)]
    for part, (low, high) in {"0": (0, 30), "30": (30, 70), "70": (70, 89), "headline": (50, 89)}.items():
        count, loss, _, sum_kl, _ = found["sums"][part]
        assert count == high - low and sum_kl == pytest.approx(sum(kl[low:high]), rel=1e-3)
        assert loss == pytest.approx(-sum(float(p[t, ids[t + 1]]) for t in range(low, high)), rel=1e-4)
    config, heads = moh.config, moh.config.num_attention_heads * moh.config.num_hidden_layers
    on = sum(config.active_heads_per_layer)
    read = sum(on * (t + 1) + (heads - on) * min(t + 1, 12) for t in range(50, 90))
    assert found["keys"]["from 50"] == pytest.approx(read / (heads * sum(range(51, 91))))


class Middle:
    """A press that keeps the first two tokens and the last ones, in the manner of kvpress's classes."""

    def __init__(self, compression_ratio: float):
        self.ratio = compression_ratio

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[1] == keys.shape[2] == 600
        return scores(module.layer_idx)[None]

    @contextmanager
    def __call__(self, model):
        def drop(module, args, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            length = layer.keys.shape[2]
            kept = [0, 1, *range(length + 2 - int(length * (1 - self.ratio)), length)]
            layer.keys, layer.values = layer.keys[:, :, kept].clone(), layer.values[:, :, kept].clone()

        hooks = [layer.self_attn.register_forward_hook(drop, with_kwargs=True) for layer in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def test_a_press_keeps_as_many_bytes_as_a_cache_and_later_tokens_do_not_see_the_others(make_pair, monkeypatch):
    monkeypatch.setattr(long_context, "HEADLINE", 600)
    plan = {"shared_heads": [[2, 3], []], "router_type": "none", "routing_granularity": "kv_group", "local_window": 8}
    plan |= {"num_shared_heads": [2, 0], "num_active_heads": [2, 0], "head_fallback": "local", "local_start": 0}
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "max_position_embeddings": 1024}
    base, moh = make_pair(num_hidden_layers=2, initializer_range=0.2, **shape, **plan)
    ids = torch.randint(3, 200, (640,), generator=torch.Generator().manual_seed(0))
    found = long_context.compare(base, {"moh": moh}, ids, {"Middle": Middle}, {"out/moh": moh})
    plain = long_context.compare(base, {"moh": moh}, ids, None)["moh"]
    assert found["moh"]["sums"]["headline"] == pytest.approx(plain["sums"]["headline"], rel=1e-3)
    assert found["moh"]["keys"] == pytest.approx(plain["keys"])
    same = found["moh/Middle+moh"]  # has nothing to drop
    assert same["bytes"][0] == found["moh"]["bytes"][0] and same["keys"] == pytest.approx(plain["keys"])
    assert same["sums"] == {part: pytest.approx(sums, rel=1e-3) for part, sums in plain["sums"].items()}
    # One group of six keeps 600 tokens; the others those of a MoHCache: sinks, window and what may be cropped.
    token = 2 * 8 * 4  # bytes of a key and a value
    of_groups = 600 + 5 * (4 + 7 + 64)
    assert found["moh"]["bytes"][0] == pytest.approx(of_groups * token, abs=5000)  # and where documents begin
    kept = int(found["moh"]["bytes"][0] / (6 * token))
    assert found["moh/Middle"]["bytes"] == [kept * 6 * token, (kept + 40) * 6 * token]
    assert found["moh/Middle"]["keys"]["from 600"] == pytest.approx(
        sum(kept + n for n in range(1, 41)) / sum(range(601, 641))
    )
    at = torch.arange(640)
    shown = (at[None] <= at[:, None]) & ((at[:, None] < 600) | (at < 2) | (at >= 602 - kept))
    p, q = (
        base(ids[None], attention_mask=mask, use_cache=False).logits[0, 600:639].double().log_softmax(-1)
        for mask in (shown[None, None], None)
    )
    kl = (q.exp() * (q - p)).sum().item()
    assert kl > 0.01 and found["moh/Middle"]["sums"]["headline"][3] == pytest.approx(kl, rel=1e-3)


def scores(layer: int) -> torch.Tensor:
    """Different ones `[3, 600]` for each group, all of them distinct."""
    return (torch.arange(600) * 7 + torch.tensor([[11], [101], [301]]) * (layer + 1)) % 600.0


@torch.no_grad()
@pytest.mark.parametrize("backends", [attention.BACKENDS, {}], ids=["fast", "reference"])
def test_of_a_converted_model_a_press_drops_keys_of_the_groups_that_are_on(make_pair, monkeypatch, backends):
    monkeypatch.setattr(attention, "BACKENDS", backends)
    plan = {"shared_heads": [[2, 3], [], [0, 1, 2, 3, 4, 5]], "router_type": "none", "routing_granularity": "kv_group"}
    plan |= {"num_shared_heads": [2, 0, 6], "num_active_heads": [2, 0, 6], "head_fallback": "local", "local_window": 8}
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "max_position_embeddings": 1024}
    _, moh = make_pair(num_hidden_layers=3, initializer_range=0.2, **shape, **plan, local_start=0)
    ids = torch.randint(3, 200, (640,), generator=torch.Generator().manual_seed(0))
    token = 2 * 8 * 4  # bytes of a key and a value
    hidden, (then, _), dropped = read_pressed(moh, ids[None], 600, 1500 * token, Middle)
    # Four groups keep as many tokens each; five those of a MoHCache: sinks, window and what may be cropped. 600 numbers
    # say where documents begin.
    kept = (1500 - 5 * (4 + 7 + 64) - 600 * 8 // token) // 4
    assert dropped == 600 - kept and 1496 * token < then <= 1500 * token
    shown = torch.ones(3, 3, 640, 640, dtype=torch.bool).tril()  # layer, group, query, key
    for layer, group in ((0, 1), *((2, group) for group in range(3))):
        shown[layer, group, 600:, scores(layer)[group].argsort()[:dropped]] = False
    shown = shown.repeat_interleave(2, dim=1)[:, None]

    def masked_full(module, query, key, value, *args, scaling, **kwargs):
        states = query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        out = scaled_dot_product_attention(*states, attn_mask=shown[module.layer_idx], scale=scaling)
        return out.transpose(1, 2), None

    def masked(query, key, value, first, seen, scaling, distant, module, **kwargs):
        seen = seen._replace(visible=shown[module.layer_idx])
        return masked_attention(query, key, value, first, seen, scaling, distant)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", masked_full)
    monkeypatch.setattr(attention_moh, "interval_attention", masked)
    wanted = moh.model(ids[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(hidden, wanted, rtol=1e-3, atol=1e-4)
    monkeypatch.undo()
    monkeypatch.setattr(attention, "BACKENDS", backends)
    _, cache = press_prompt(moh, ids[None, :600], 1500 * token, Middle)
    steps = [read_later(moh, ids[None, at : at + 1], cache, at)[0] for at in range(600, 640)]
    torch.testing.assert_close(torch.cat(steps), hidden[600:], rtol=1e-3, atol=1e-4)


def test_a_press_that_is_not_there_is_named(folders, tmp_path, monkeypatch, capsys):
    base, moh = map(str, folders)
    words = ["long_context.py", moh, "a.jsonl", "--base", base, "--presses", "NoSuchPress"]
    monkeypatch.setattr(sys, "argv", words)
    assert long_context.main() == 1 and "kvpress" in capsys.readouterr().err


def test_the_command_goes_on_where_it_stopped(folders, tmp_path, monkeypatch, capsys):
    base, moh = map(str, folders)
    text = tmp_path / "long.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} " * 800}) + "\n" for n in range(3)))
    command = ["long_context.py", moh, str(text), "--base", base, "--context", "640"]
    command += ["--prompts", "4", "--json", str(tmp_path / "f.json")]
    monkeypatch.setattr(sys, "argv", [*command, "--documents", "2"])
    assert long_context.main() == 0
    out, config = capsys.readouterr().out, MoHLlamaForCausalLM.from_pretrained(moh).config
    assert "2 documents of 640 tokens" in out
    theory = forward_flops(config, 640) / forward_flops(config, 640, dense=True)
    assert theory < 1 and f"in theory {theory:.3f} of the base's FLOPs" in out
    compared = []
    original = long_context.compare
    monkeypatch.setattr(long_context, "compare", lambda *args: compared.append(1) or original(*args))
    monkeypatch.setattr(sys, "argv", [*command, "--documents", "3"])
    assert long_context.main() == 0 and len(compared) == 1
    monkeypatch.setattr(sys, "argv", [*command, "--documents", "3", "--context", "64"])
    assert long_context.main() == 1 and "holds figures of other models or text" in capsys.readouterr().err
