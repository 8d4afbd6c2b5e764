"""The text of model cards: what each kind of model's says, and what no record can do to it.

That its sentences state the records' figures: `tests/recount`.
"""

import argparse
import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cards import change, check_card, write_evaluation, write_run
from huggingface_hub import ModelCard
from records import make_record

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.hub.card import build_card
from moh_llm.records.conversion import LINEAGE, RunEntry, read_chain
from moh_llm.records.identity import identify
from moh_llm.records.seal import write_seal

NAME = "someone/Tiny-MoH"


@pytest.fixture(scope="module")
def conversion(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A real conversion of a base with a card and a licence, not to be changed."""
    base, output = make_llama(num_hidden_layers=3, num_attention_heads=4), tmp_path_factory.mktemp("out") / "moh_3"
    (base / "README.md").write_text("# A base, by somebody else\n")
    (base / "LICENSE.txt").write_text("MIT License\n\nCopyright (c) 2026 Somebody\n")
    assert convert(base, output) == 0
    return output


@pytest.fixture
def converted(conversion: Path, tmp_path: Path) -> Path:
    """A copy of `conversion`."""
    return Path(shutil.copytree(conversion, tmp_path / "moh"))


@pytest.fixture
def tuned(converted: Path, tmp_path: Path) -> Path:
    """RUN/model with its run behind it."""
    run = write_run(tmp_path / "recovery", str(converted))
    return Path(shutil.copytree(converted, run / "model"))


def facts(section: str) -> dict[str, str]:
    """The rows of a section's tables of names and values."""
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", section, re.MULTILINE))


def lead(card: str) -> str:
    """What stands above the first section."""
    return card.partition("\n## ")[0]


# ---- kinds of models


def test_a_converted_model(converted: Path) -> None:
    card = build_card(converted, NAME)
    sections, record = check_card(card), json.loads((converted / "conversion.json").read_text())
    found, kept = record["verification"]["converted"], facts(sections["What it keeps"])
    perplexity = f"{found['perplexity']:#.5g}, {found['perplexity_ratio']:#.5g} times the base's"
    assert kept["perplexity"] == perplexity and kept["KL to the base"] == f"{found['kl']:#.3g}"
    read, planned = (100 * record[part]["keys_read"] for part in ("verification", "plan"))
    assert kept["keys read (planned), % of the base's"] == f"{read:.1f} ({planned:.1f})"
    of_base = record["verification"]["base_perplexity"]
    told = f"perplexity {found['perplexity']:.2f}, the base's {of_base:.2f}; KL {found['kl']:.4f}"
    assert f"On held-out text: {told}" in lead(card)
    assert "tuned" not in sections["What it keeps"] and "No training run is on record" in sections["How it was made"]
    assert "Licence: `mit`, according to LICENSE.txt of the base." in sections["Limits"]


def test_a_conversion_leaves_its_card_and_publishing_writes_it_anew(conversion: Path) -> None:
    card = (conversion / "README.md").read_text()
    assert ModelCard(card).data.license == "mit" and 'pipeline("text-generation", ".", ' in card
    assert "\n# moh_3\n" in card and "somebody else" not in card and str(conversion.parent) not in card
    published = build_card(conversion, "me/toy")
    assert "\n# toy\n" in published and 'pipeline("text-generation", "me/toy", ' in published


def test_a_tuned_model_finds_the_run_behind_it(tuned: Path) -> None:
    card = build_card(tuned, NAME)
    sections = check_card(card)
    kept = facts(sections["What it keeps"])
    assert kept["perplexity"].endswith(" | 22.000, 1.1000 (1.0812 to 1.1234) times the base's")
    assert kept["KL to the base"].endswith(" | 0.0500 (0.0410 to 0.0620)")
    assert "at a learning rate of 5e-05, on cpu" in sections["How it was made"]
    scores = {"tokens": 500, "documents": 40, "perplexity": 22.0, "keys_read": 0.345, "heads_read": 2.125}
    write_run(tuned.parent, "gone", record={"keys_asked": 0.33, "keys_calibrated": 0.331, "evaluation": scores})
    kept = facts(check_card(build_card(tuned, NAME))["What it keeps"])
    assert kept["keys read (planned), % of the base's"].endswith(" | 34.5 (33.0)")
    # Those of the saved model, not of the log's last score.
    assert re.fullmatch(r"[\d.]+ \| 2\.125 \(3\)", kept["heads on (planned), of 4"])
    assert kept["perplexity"].endswith(" | 22.000")
    record = {"status": "running", "data_read": None, "evaluation": None, "keys_asked": 0.33}
    write_run(tuned.parent, "gone", scores=0, record=record)
    sections = check_card(build_card(tuned, NAME))
    assert "**The run has not finished" in sections["How it was made"]
    kept = facts(sections["What it keeps"])
    assert kept["perplexity"].endswith(" | -")
    assert kept["keys read (planned), % of the base's"].endswith(" | - (33.0)")


def test_a_tuned_model_without_its_run_has_no_figures_of_its_own(converted: Path) -> None:
    chain = read_chain(converted)
    facts_of_run = {"objective": "distillation", "tokens": 64, "steps": 1, "mixture": "m", "seed": 0, "teacher": "base"}
    both = {"began_with": chain.entries[-1].made, "made": chain.entries[-1].made}
    chain.with_entry(RunEntry(kind="run", lora_rank=None, **facts_of_run, **both)).write(converted / LINEAGE)
    write_seal(converted, both["made"])
    card = build_card(converted, NAME)
    section = check_card(card)["What it keeps"]
    assert "On held-out text" not in lead(card)
    assert "(" not in facts(section)["heads on (planned), of 4"]
    assert "the plan by layer, which may be from before its last training." in section


def test_a_model_from_scratch(folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "out/initial", objective={"kind": "cross_entropy"})
    model = shutil.copytree(folder, run / "model")
    sections = check_card(build_card(model, NAME))
    assert "No base: the weights were initialised at random" in sections["How it was made"]
    assert "is not on record" not in sections["What it keeps"]
    alone = check_card(build_card(folder, NAME))
    assert "No base is on record" in alone["How it was made"] and "is not on record" in alone["What it keeps"]
    assert "compared at the lengths above" in sections["Limits"] and "lengths above" not in alone["Limits"]


def test_an_evaluated_model(converted: Path, tmp_path: Path) -> None:
    record = make_record({"base": ("b", 1.0), "model": (identify(str(converted)), 0.9), "other": ("o", 0.5)}).content()
    record["errors"] = [{"model": "other", "benchmark": "A", "error": "no memory"}]
    folder = write_evaluation(tmp_path / "report", record)
    card = build_card(converted, NAME, evaluation=folder)
    assert "**This model scores" in lead(card) and "smoke test" not in card
    assert card == build_card(converted, NAME, evaluation=folder / "report.json")
    sections = check_card(card)
    found = sections["Benchmarks"]
    row, base = (record["benchmarks"][0]["scores"][label] for label in ("model", "base"))
    scores = f"{base['value']:.1f} ± {base['stderr']:.1f} | {row['value']:.1f} ± {row['stderr']:.1f}"
    assert f"| A | 0 | acc | 200 | 25.0 | {scores} | {row['delta']['value']:+.1f} ±" in found
    average = record["average"]["scores"]["model"]
    shares = f"| {average['recovery']['share']:.1f} | {average['margin_kept']['share']:.1f} |"
    assert shares in found.split("average** |")[1]
    assert "| at chance |" in found.split("| B |")[1].split("\n")[0]
    assert not re.search(r"\bother\b", found) and "no memory" not in card
    write_evaluation(folder, record | {"limit": 2})
    card = build_card(converted, NAME, evaluation=folder)
    assert "> - **NOT COMPARABLE: --limit 2" in check_card(card)["Benchmarks"]
    assert "No benchmark was run beyond a smoke test" in lead(card) and "This model scores" not in lead(card)
    few = [row | {"items_in_full": 30} for row in record["benchmarks"]]
    card = build_card(converted, NAME, evaluation=write_evaluation(folder, record | {"benchmarks": few}))
    assert "No benchmark was run beyond a smoke test" in lead(card) and "This model scores" not in lead(card)
    assert lead(card).index("perplexity") < lead(card).index("smoke test")
    assert "No benchmark of quality" in check_card(card)["Limits"]
    error = {"model": "model", "benchmark": "C", "error": "/Users/me/data is not there"}
    write_evaluation(folder, record | {"errors": [error]})
    found = check_card(build_card(converted, NAME, evaluation=folder))["Benchmarks"]
    assert "> - **FAILED: C on model (data is not there).**" in found
    write_evaluation(folder, make_record({"model": ("other", 0.9)}).content())
    with pytest.raises(UserError, match="scored other weights than those in"):
        build_card(converted, NAME, evaluation=folder)


# ---- its parts


@pytest.mark.parametrize("router", ["threshold", "none"])
def test_local_fallbacks_have_all_heads_on_at_first(folder: Path, router: str) -> None:
    """The plan asks nothing of a document's first tokens, nor of heads that are never on."""
    plan = {"num_shared_heads": 3, "num_active_heads": 3, "shared_heads": None, "local_window": 8, "local_sinks": 4}
    plan |= {"head_fallback": "local", "local_start": 20, "never_on_heads": [[6, 7], [7]], "router_type": router}
    change(folder / "config.json", **plan)
    told = check_card(build_card(folder, NAME))["What it keeps"]
    assert "The first 20 tokens of a document have all heads on, which" in told
    assert "attends to the first 4 tokens, to the last 8, and" in told
    assert ("a router chooses" in told) == (router != "none")


def test_long_contexts_have_figures_of_retrieval(converted: Path) -> None:
    record = json.loads((converted / "conversion.json").read_text())
    retrieval = [{"task": "copying", "asked": 120, "base": 96, "converted": 48}]
    proof = record["verification"] | {"retrieval": retrieval}
    change(converted / "conversion.json", verification=proof, plan=record["plan"] | {"context": 8192})
    section = check_card(build_card(converted, NAME))["What it keeps"]
    kept = facts(section)
    assert kept["copying, right of 120"] == "48; the base 96" and "| as converted, 8,192 tokens |" in section


def test_text_that_was_not_read_is_not_told(converted: Path) -> None:
    change(converted / "conversion.json", verification=None, calibration=None, parameters=None)
    sections = check_card(build_card(converted, NAME))
    assert "How close the model is to its base is not on record" in sections["What it keeps"]
    assert "The conversion fitted nothing." in sections["How it was made"]


@pytest.mark.parametrize(
    ("record", "changes", "told"),
    [
        ("conversion.json", {"plan": []}, "has plan = []: Input should be a valid dictionary"),
        ("lineage.json", {"entries": [{"kind": "run", "tokens": 5}]}, "lacks entries"),
    ],
)
def test_a_malformed_record_is_one_line(converted: Path, record: str, changes: dict, told: str, capsys) -> None:
    change(converted / record, **changes)
    assert main(["publish", str(converted), "--repo-id", NAME, "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{converted / record} {told}" in line


# ---- what it must not do


EVIL = "x`y|z**\n---\nlicense: mit\n---\n# Pwned\n<script>alert(1)</script> [a](http://b) {{ 7*7 }} {% raw %}"


def test_hostile_names_stay_text(tuned: Path, tmp_path: Path) -> None:
    clean = set(check_card(build_card(tuned, NAME)))
    conversion = json.loads((tuned / "conversion.json").read_text())
    change(
        tuned / "conversion.json",
        base={"name": EVIL, "revision": None, "dense_sha256": EVIL},
        calibration=conversion["calibration"] | {"tokens_of_source": {EVIL: 9}},
        moh_llm=EVIL,
    )
    read = {"weight": 1.0, "tokens": 192, "share": 1.0, "epochs": 0.5, "repeated_tokens": 0}
    data = {"mixture": EVIL, "sequence_length": 16, "batch_size": 2}
    write_run(tuned.parent, EVIL, record={"data_read": {EVIL: read}, "device": EVIL}, data=data)
    record = make_record({"base": ("b", 1.0), EVIL: (identify(str(tuned)), 0.9)}).content()
    record["suite"]["title"] = record["suite"]["name"] = EVIL
    record["benchmarks"][0] |= {"name": EVIL, "metric": EVIL, "dataset": EVIL}
    record["benchmarks"][0]["scores"][EVIL]["truncated"] = True
    record["errors"] = [{"model": EVIL, "benchmark": "C", "error": EVIL}]
    (tuned / "LICENSE").write_text("MIT License")
    card = build_card(tuned, NAME, evaluation=write_evaluation(tmp_path / "report", record))
    assert set(check_card(card)) == clean | {"Benchmarks"}
    in_text = ModelCard(card).text.replace(r"\`", "").split("`")[::2]
    assert not any("<script" in part for part in in_text)
    assert "{{ 7\\*7 }} {% raw %}" in card
    assert ModelCard(card).data.license == "mit" and ModelCard(card).data.base_model is None


@pytest.mark.parametrize(
    ("fallback", "repo_id", "revision"),
    [("local", "org/my_model_1", "a'b;c"), ("value", "org/my_model_1", None), ("local", None, None)],
)
def test_what_a_card_tells_to_run_is_as_it_is_typed(fallback, repo_id, revision, folder: Path) -> None:
    """No word of a command is Markdown's escape of one; the Python is Python."""
    change(folder / "config.json", head_fallback=fallback)
    card = build_card(folder, repo_id, revision=revision, licence="apache-2.0")
    blocks = re.findall(r"```(\w+)\n(.*?)```", card, re.DOTALL)
    (command,) = [line for kind, block in blocks if kind == "bash" for line in block.splitlines() if line]
    assert "\\" not in command
    vllm = argparse.ArgumentParser(exit_on_error=False)
    vllm.add_argument("call", nargs=2)
    vllm.add_argument("model")
    for flag in ("--enforce-eager", "--trust-remote-code"):
        vllm.add_argument(flag, action="store_true")
    vllm.add_argument("--model-impl", choices=["transformers"])
    vllm.add_argument("--revision")
    found = vllm.parse_args(shlex.split(command))
    assert (found.call, found.model) == (["vllm", "serve"], repo_id or ".")
    assert found.enforce_eager == (fallback == "local") and found.revision == revision
    (python,) = [block for kind, block in blocks if kind == "python"]
    calls = [node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call)]
    revisions = {ast.literal_eval(word.value) for call in calls for word in call.keywords if word.arg == "revision"}
    assert revisions == ({revision} if revision else set())


@pytest.mark.slow
def test_how_to_load_runs_as_written(conversion: Path) -> None:
    """In a process of its own, without MoH-LLM and without anybody to answer questions."""
    loading = check_card((conversion / "README.md").read_text())["How to load and serve"]
    code = loading.split("```python\n")[1].split("```")[0]
    command = [sys.executable, "-I", "-c", f"import sys; sys.modules['moh_llm'] = None\n{code}"]
    ran = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=conversion, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() and "trust_remote_code" not in ran.stdout + ran.stderr
