"""The benchmark of RULER beside other methods: answers are those of `generate`, and a press changes the cache alone."""

import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import ruler_rivals
from ruler_rivals import answer, print_table, read_prompt

from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.reading import read_json

KINDS = AutoModelForCausalLM, MoHLlamaForCausalLM
TOKENIZER = SimpleNamespace(decode=lambda ids: "".join(f" {id}," for id in map(int, ids)), eos_token_id=-1)


class Last:
    """A press that keeps the last tokens, in the manner of kvpress's classes."""

    def __init__(self, compression_ratio: float):
        self.ratio = compression_ratio

    @contextmanager
    def __call__(self, model):
        def drop(module, args, kwargs, output):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            first = layer.keys.shape[2] - int(layer.keys.shape[2] * (1 - self.ratio))
            layer.keys, layer.values = layer.keys[:, :, first:].clone(), layer.values[:, :, first:].clone()

        hooks = [layer.self_attn.register_forward_hook(drop, with_kwargs=True) for layer in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()


@pytest.fixture(scope="module")
def folders(make_llama, convert, tmp_path_factory) -> tuple[Path, Path]:
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    base, moh = make_llama(**fields, initializer_range=0.1), tmp_path_factory.mktemp("converted") / "moh"
    flags = ["--keys", "0.4", "--heldout-tokens", "0", "--context", "64", "--local-window", "4", "--local-start", "0"]
    flags += ["--routing-granularity", "kv_group", "--router", "none"]
    assert convert(base, moh, *flags) == 0
    return base, moh


@torch.inference_mode()
def test_an_answer_is_the_one_that_generate_gives(folders, monkeypatch):
    models = [kind.from_pretrained(path) for kind, path in zip(KINDS, folders, strict=True)]
    monkeypatch.setattr(ruler_rivals, "ANSWER", 6)
    places, reads = [], ruler_rivals.read_later
    monkeypatch.setattr(ruler_rivals, "read_later", lambda *given: (places.append(given[3]), reads(*given))[1])
    ids = torch.randint(3, 100, (1, 56), generator=torch.Generator().manual_seed(1))
    for model in models:
        given = model.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=None)[:, 56:]
        for tokens, solved in ((6, True), (7, False)):
            prompt = *ids.split([48, 8], 1), given[:, :tokens]
            for aware in (False, True):
                places.clear()
                found = answer(model, prompt, partial(read_prompt, model), TOKENIZER, aware)
                assert found["solved"] == solved
                # Tokens of tiny models seldom depend on these.
                assert places == [55 if aware else 48, 56, 57, 58, 59, 60]


def test_all_ways_answer_the_prompts_and_a_run_goes_on(folders, tmp_path, monkeypatch, capsys):
    base, moh = folders
    ids = torch.randint(3, 100, (2, 600), generator=torch.Generator().manual_seed(1))
    prompts = [row[None].split([590, 8, 2], 1) for row in ids]
    monkeypatch.setattr(ruler_rivals, "read_prompts", lambda task, args, *_: prompts[: args.prompts])
    monkeypatch.setattr(ruler_rivals, "press_of", {"Last": Last}.get)
    words = ["ruler_rivals.py", *map(str, (base, "--models", moh, "--bytes-of", moh, "--output-dir", tmp_path / "out"))]
    words += ["--tasks", "single_2", "--presses", "Last", "--query-aware", "Last", "--prompts"]
    monkeypatch.setattr(sys, "argv", [*words, "1"])
    assert ruler_rivals.main() == 0
    first = read_json(tmp_path / "out" / "figures.json")
    monkeypatch.setattr(sys, "argv", [*words, "2"])
    assert ruler_rivals.main() == 0
    found = read_json(tmp_path / "out" / "figures.json")
    assert list(found) == ["single_2 0", "single_2 1"] and found["single_2 0"] == first["single_2 0"]
    ways = ["base", moh.name, f"Last, bytes of {moh.name}", f"Last with the question, bytes of {moh.name}"]
    for row in found.values():
        assert list(row) == ways
        sizes = [row[way]["bytes"] for way in ways]
        token = sizes[0] / 590
        assert all(sizes[1] - token < size <= sizes[1] < sizes[0] for size in sizes[2:])
    assert "2 prompts of single_2" in (said := capsys.readouterr().out) and f"| {ways[3]} |" in said
    monkeypatch.setattr(sys, "argv", [*words, "2", "--length", "8192"])
    assert ruler_rivals.main() == 1 and "length" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "2", "--models", str(moh), str(tmp_path / moh.name)])
    assert ruler_rivals.main() == 1 and "two are called the same" in capsys.readouterr().err


def test_the_table_has_shares_of_the_base_and_times_over_its(capsys):
    solved = {"base": [1, 1, 1, 1, 0], "moh": [1, 1, 1, 0, 0], "Last, bytes of moh": [1, 0, 0, 1, 0]}
    found = {
        f"single_2 {n}": {
            way: {"solved": own[n], "read_s": (2 if way == "base" else 3) * (n + 1), "step_s": 0.5, "bytes": 3 << 19}
            for way, own in solved.items()
        }
        for n in range(5)
    }
    print_table(found, ["single_2"])
    *_, base, moh, _, pair = capsys.readouterr().out.splitlines()
    assert pair == "Last, bytes of moh: 2 prompts are solved by that model alone, 1 by this way alone"
    assert base == "| base | 80.0 | 80.0 | 100 |  | 1.50 | 6.000 s | 0.500 s |"
    assert moh.startswith("| moh | 60.0 | 60.0 | 75.0 (") and " | -20.0 ± 20.0 | 1.50 | 1.500 (1.500 to 1.500) |" in moh
