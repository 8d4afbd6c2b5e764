"""The benchmark of rivals: what its methods are, that it goes on where it stopped, and that a seed takes other text."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from layer_samples import make_sample
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from moh_llm.conversion.plan import PlanOptions, build_config
from moh_llm.data.mixture import mixture_from_arguments
from moh_llm.metrics import logits_of
from moh_llm.modeling import MoHLlamaForCausalLM, MoHRouter

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import rivals
from baselines.routers import RouterFitter
from local_plans import calibration_part

BUDGET = 4
PLAIN = ["ours", "paper's layer", "fixed heads", "oracle"]  # that draw nothing


@pytest.fixture(scope="module")
def base(make_llama) -> Path:
    return make_llama(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, initializer_range=0.1)


@pytest.fixture
def fits(monkeypatch) -> list[dict]:
    """What each seed's calibration found."""
    found, fit_methods = [], rivals.fit_methods
    monkeypatch.setattr(rivals, "fit_methods", lambda *args: found.append(fit_methods(*args)) or found[-1])
    return found


@pytest.fixture
def command(base, river, tmp_path, monkeypatch, capsys):
    """Run the command; returns its status, the table's rows by method (KL, then ratio), the record, and all output."""

    def run(output: str, *arguments: str):
        words = ["rivals.py", str(base), "--calibration", str(river), "--calibration-tokens", "1024"]
        words += ["--text", str(river), "--documents", "6", "--tokens-per-document", "200", "--last"]
        words += ["--budgets", str(BUDGET)]
        monkeypatch.setattr(sys, "argv", [*words, "--output-dir", str(tmp_path / output), *arguments])
        status = rivals.main()
        printed = capsys.readouterr()
        rows = re.findall(r"^\| 0\.667 \| ([^|]+) \| ([\d.]+) \(.*?\| ([\d.]+) \(", printed.out, re.MULTILINE)
        path = tmp_path / output / "figures.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        return status, {name: (float(kl), float(x)) for name, kl, x in rows}, record, printed.out + printed.err

    return run


@pytest.mark.slow
def test_every_method_has_a_row_and_ours_is_the_converters(
    command, fits, one_thread, base, river, convert, read_tensors, tmp_path
):
    status, rows, record, said = command("out", "--seeds", "0", "1")
    assert status == 0 and list(rows) == list(rivals.NAMES)
    kl = {name: row[0] for name, row in rows.items()}
    assert kl["oracle"] < kl["ours"] < kl["ours, no fallback"] and len({*kl.values()}) > 10
    less = dict(re.findall(r"^\| 0\.667 \| ([^|]+) \| .*\| (-?[\d.]+) \([^|]*\) \|$", said, re.MULTILINE))
    assert {name: float(found) for name, found in less.items()} == {
        name: pytest.approx(found - kl["ours"], abs=2e-4) for name, found in kl.items() if name != "ours"
    }
    seeds = record["seeds"]
    assert seeds["0"] != seeds["1"]
    # With the converter's own text, seed 0 is the converter's model.
    flags = ["--fallback", "value", "--num-active-heads", str(BUDGET), "--heldout-tokens", "0"]
    assert convert(base, tmp_path / "moh", *flags) == 0
    written = read_tensors(tmp_path / "moh")
    fitted = fits[0][f"ours/{BUDGET}"]["tensors"]
    assert fitted and all(written[name].equal(tensor) for name, tensor in fitted.items())
    model = MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh", dtype=torch.bfloat16).eval()
    dense = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    (logits,) = rivals.open_candidates(dense, fits[0], ["ours"]).values()
    batch = {"input_ids": torch.randint(200, (2, 30)), "position_ids": torch.arange(30).expand(2, -1)}
    with torch.no_grad():
        assert logits(batch).equal(logits_of(model)(batch))


def test_it_goes_on_where_it_stopped(command, one_thread, river, tmp_path):
    (tmp_path / "part.jsonl").write_text("".join(river.read_text().splitlines(keepends=True)[:24]))
    flags = ["--methods", *PLAIN, "--text", str(river), str(tmp_path / "part.jsonl")]
    _, rows, record, _ = command("out", *flags)
    whole, second = json.dumps(record["seeds"]), str(tmp_path / "part.jsonl")
    assert record["seeds"]["0"].pop(second)
    path = tmp_path / "out" / "figures.json"
    path.write_text(json.dumps(record))
    status, again, record, _ = command("out", *flags)
    assert status == 0 and again == rows and json.loads(whole) == record["seeds"]
    status, _, _, said = command("out", "--methods", "ours")
    assert status == 1 and "holds results of another" in said
    path.write_text(json.dumps(record | {"calibration": {"0": "other"}}))
    status, _, _, said = command("out", *flags)
    assert status == 1 and "another calibration text" in said


def test_a_seed_takes_the_text_after_that_of_the_seeds_before(base, river):
    tokenizer, mixture = AutoTokenizer.from_pretrained(base), mixture_from_arguments([str(river)])

    def ids(tokens: int, seed: int) -> torch.Tensor:
        return torch.cat([b["input_ids"] for b in calibration_part(mixture, tokenizer, tokens, 64, seed)])

    assert torch.cat([ids(640, seed) for seed in range(3)]).equal(ids(3 * 640, 0))


def test_costs_are_of_the_heads_that_the_router_drops():
    """Without fallbacks, of the two routed heads whose queries are the longest after the shared one's."""
    sample, _ = make_sample(hidden=8)
    config = LlamaConfig(hidden_size=8, num_attention_heads=4, num_hidden_layers=1, head_dim=3, vocab_size=8)
    plan = PlanOptions(num_active_heads=2, num_shared_heads=1, fallback="none")
    built = build_config(config, plan, [[0]], [2])
    built.router_type = "query_norm"
    queries = torch.randn(len(sample.inputs), 4, 3, generator=torch.Generator().manual_seed(1))
    fit = RouterFitter(sample, MoHRouter(built, 0), queries, fallback=False).fit(2)
    effects = []
    for token in range(sample.fitted, len(sample.inputs)):
        off = 1 + queries[token, 1:].norm(dim=-1).argsort()[:2]
        error = sum(sample.heads[head, token] @ sample.o_proj[:, 3 * head : 3 * head + 3].T for head in off.tolist())
        effects.append((error @ sample.gradients[token - sample.fitted]).item())
    assert fit.cost == pytest.approx(np.square(effects).mean() / 2, rel=1e-5)
    assert (fit.dropped, fit.shared_heads, fit.tensors) == (2, [0], {})


def test_a_budget_may_be_a_fraction_of_a_head(command, fits):
    status, _, record, said = command("out", "--methods", "ours", "fixed heads", "--budgets", "4.5", "--by-text")
    assert status == 0
    (text,) = record["seeds"]["0"]
    assert said.count(f"{text}: 6 documents") == 2  # over all texts, and of the only one
    assert len(re.findall(r"^\| 0\.750 \| (?:ours|fixed heads) \|", said, re.MULTILINE)) == 4
    for fitted in fits[0].values():
        assert sum(fitted["config"].num_active_heads) == 9  # of two layers
