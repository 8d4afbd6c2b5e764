"""The text of model cards: what each kind of model's says, and what no record can do to it."""

import argparse
import ast
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cards import change, check_card, write_evaluation, write_run
from huggingface_hub import ModelCard
from records import make_record

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.flops import forward_flops
from moh_llm.hub.card import build_card
from moh_llm.intervals import show_documents
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import read_conversion
from moh_llm.records.identity import identify

NAME = "someone/Tiny-MoH"


@pytest.fixture(scope="module")
def conversion(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A real conversion of a base with a licence, not to be changed."""
    base, output = make_llama(num_hidden_layers=3, num_attention_heads=4), tmp_path_factory.mktemp("out") / "moh"
    (base / "LICENSE.txt").write_text("MIT License\n\nCopyright (c) 2026 Somebody\n")
    assert convert(base, output, "--num-active-heads", "3") == 0
    return output


@pytest.fixture
def converted(conversion: Path, tmp_path: Path) -> Path:
    """A copy of `conversion`."""
    return Path(shutil.copytree(conversion, tmp_path / "moh"))


@pytest.fixture
def tuned(converted: Path, tmp_path: Path) -> Path:
    """RUN/model with its run behind it."""
    run = write_run(tmp_path / "run", str(converted))
    return Path(shutil.copytree(converted, run / "model"))


def test_a_converted_model(converted: Path) -> None:
    card = build_card(converted, NAME)
    sections = check_card(card)
    record = json.loads((converted / "conversion.json").read_text())
    proof, found = record["verification"], sections["Conversion proof"]
    documents = show_documents(proof["held_out_documents"])
    assert documents.endswith("no interval") and "95 % interval" not in found
    assert f"bit for bit, on {proof['all_heads_active']['tokens']:,} tokens" in found
    assert f"{proof['held_out_tokens']:,} tokens of held-out text ({documents}); the base's" in found
    ratio, kl = proof["converted"]["perplexity_ratio"], proof["converted"]["kl"]
    assert f"| {ratio:#.5g} | {kl:#.3g} |" in found.split("the converted model |")[1]
    assert "licensed" not in card and "`mit`, according to LICENSE.txt of the base" in card
    assert Path(record["base"]["name"]).name in sections["Base model and licence"]
    assert "No training run is on record" in sections["Text it was trained on"]
    assert "The conversion was fitted on 1,024 tokens, read from: " in sections["Text it was converted with"]
    assert "No benchmark was run" in sections["Benchmarks"] and "No benchmark was run" in sections["Limits"]
    assert not {"Training", "Recovery", "Reservations"} & set(sections)
    config = MoHLlamaConfig.from_pretrained(converted)
    assert "| heads asked for per token, mean over layers | 3 (75.0%) |" in sections["Head plan"]
    lengths = [length for length in (512, 2048, 8192) if length <= config.max_position_embeddings]
    for length in (record["plan"]["context"], *lengths):
        ratio = forward_flops(config, length) / forward_flops(config, length, dense=True)
        assert f"{ratio:#.4g} |" in sections["Efficiency"]
    assert "No time was measured on this model" in sections["Efficiency"]
    assert f'from_pretrained("{NAME}", trust_remote_code=True)' in sections["How to load"]
    assert "`modeling_moh_llama.py`" in sections["How to load"] and "docs/serving.md" in sections["How to serve"]
    assert "2410.11842" in sections["Citation"] and "ICML" in sections["Citation"]


def test_engines_need_moh_llm_for_local_fallbacks(converted: Path) -> None:
    assert "--model-impl transformers" in check_card(build_card(converted, NAME))["How to serve"]
    change(converted / "config.json", head_fallback="local")
    served = check_card(build_card(converted, NAME))["How to serve"]
    assert "pip install --no-deps moh-llm" in served and "--model-impl" not in served


def test_long_contexts_are_shown_by_position(converted: Path) -> None:
    record = json.loads((converted / "conversion.json").read_text())
    proof = record["verification"] | {
        "by_position": [{"start": 2048, "tokens": 6144, "perplexity_ratio": 1.25, "kl": 0.0125}],
        "retrieval": [{"task": "copying", "asked": 120, "base": 96, "converted": 48}],
    }
    change(converted / "conversion.json", verification=proof, plan=record["plan"] | {"context": 8192})
    found = check_card(build_card(converted, NAME))["Conversion proof"]
    assert "in one prompt of 8,192 tokens" in found
    assert re.search(r"from 2048 +\| 6,144 +\| 1\.2500 +\| 0\.0125", found)
    assert re.search(r"copying +\| 120 +\| 96 +\| 48", found)


def test_figures_carry_documents_and_intervals(converted: Path) -> None:
    proof = json.loads((converted / "conversion.json").read_text())["verification"]
    figures = proof["converted"] | {"perplexity_ratio": 1.03, "ratio_interval": [1.0125, 1.0444]}
    figures |= {"kl": 0.04, "kl_interval": [0.0312, 0.0523]}
    proof |= {"held_out_documents": 1234, "converted": figures}
    change(converted / "conversion.json", verification=proof)
    card = build_card(converted, NAME)
    found = check_card(card)["Conversion proof"]
    assert "tokens of held-out text (1,234 documents); the base's" in found and "95 % intervals" in found
    assert "| 1.0300 (1.0125 to 1.0444) | 0.0400 (0.0312 to 0.0523) |" in found
    assert "on held-out text, 1,234 documents (95 % interval 1.0125 to 1.0444)." in card


def test_records_of_earlier_versions_are_read(converted: Path) -> None:
    """Verification had rows of the paper's layer and of random heads; they are kept, and not shown."""
    card = build_card(converted, NAME)
    proof = json.loads((converted / "conversion.json").read_text())["verification"]
    proof |= {"paper_router": proof["converted"], "random_heads": proof["converted"], "paper_active_heads": 3}
    proof["layers"] = [layer | {"attention_output_error_paper": 0.5} for layer in proof["layers"]]
    change(converted / "conversion.json", verification=proof)
    read = read_conversion(converted)
    assert read is not None and json.loads(read.model_dump_json())["verification"]["paper_active_heads"] == 3
    assert build_card(converted, NAME) == card


def test_a_tuned_model_finds_the_run_behind_it(tuned: Path) -> None:
    card = build_card(tuned, NAME)
    sections = check_card(card)
    assert build_card(tuned, NAME, run=tuned.parent) == card
    assert "Tuned on 192 tokens, it has 1.1000 times the perplexity of its base" in card
    assert "of its base, on held-out text, 40 documents (95 % interval 1.0812 to 1.1234)." in card
    assert "Scored on 500 tokens of text that the same mixture holds out" in sections["Recovery"]
    saved = (
        "| 192 (saved model) | 40 | 22.000 | 20.000 | 1.1000 (1.0812 to 1.1234) | 0.0500 (0.0410 to 0.0620) | 90.00 |"
    )
    assert saved in sections["Recovery"]
    assert "192 tokens of the mixture tiny," in sections["Text it was trained on"]
    assert "| books | 100.00% | 100.00% | 192 | 0.500 | 0 |" in sections["Text it was trained on"]
    assert "| steps | 6 of 6, each 2 sequences of 16 tokens |" in sections["Training"]
    assert (
        "| 0 | 40 | 30.000 | 20.000 | 1.5000 (1.0812 to 1.1234) | 0.500 (0.0410 to 0.0620) | 90.00 |"
        in sections["Recovery"]
    )
    assert "before it was trained" in sections["Conversion proof"]


def test_what_a_run_began_with_is_not_what_it_made(converted: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", str(converted), record={"model": {"sha256": identify(str(converted)).sha256}})
    with pytest.raises(UserError, match=r"is the model that the run in .* started from, not its result"):
        build_card(converted, NAME, run=run)


@pytest.mark.parametrize("scores", [0, 2])
def test_an_unfinished_run_says_so(tuned: Path, scores: int) -> None:
    record = {"status": "running", "data_read": None, "evaluation": None}
    write_run(tuned.parent, "gone", scores=scores, record=record)
    sections = check_card(build_card(tuned, NAME))
    assert "**The run has not finished" in sections["Training"]
    assert "not on record: the run has not finished" in sections["Text it was trained on"]
    assert ("Not measured: the run scored no held-out text." in sections["Recovery"]) == (scores == 0)


def test_an_evaluated_model(converted: Path, tmp_path: Path) -> None:
    record = make_record({"base": ("b", 1.0), "model": (identify(str(converted)), 0.9), "other": ("o", 0.5)}).content()
    record["errors"] = [{"model": "other", "benchmark": "A", "error": "no memory"}]
    folder = write_evaluation(tmp_path / "report", record)
    card = build_card(converted, NAME, evaluation=folder)
    assert card == build_card(converted, NAME, evaluation=folder / "report.json")
    found = check_card(card)["Benchmarks"]
    row, base = (record["benchmarks"][0]["scores"][label] for label in ("model", "base"))
    scores = f"{base['value']:.1f} ± {base['stderr']:.1f} | {row['value']:.1f} ± {row['stderr']:.1f}"
    assert f"| A | 0 | acc | 200 | 25.0 | {scores} | {row['delta']['value']:+.1f} ±" in found
    average = record["average"]["scores"]["model"]
    shares = f"| {average['recovery']['share']:.1f} | {average['margin_kept']['share']:.1f} |"
    assert shares in found.split("average** |")[1]
    assert average["recovery"]["share"] > average["margin_kept"]["share"]
    assert f"| {row['recovery']['share']:.1f} | {row['margin_kept']['share']:.1f} |" in found
    assert "| at chance |" in found.split("| B |")[1].split("\n")[0] and "base is at chance on B." in card
    assert "Every model was computed in float32" in found and "Chance is what a uniform guess" in found
    assert f"**This model keeps {average['recovery']['share']:.1f} % of base's average" in card
    assert not re.search(r"\bother\b", found) and "no memory" not in card


def test_limits_and_partial_data_are_loud(converted: Path, tmp_path: Path) -> None:
    record = make_record({"model": (identify(str(converted)), 0.9)}).content()
    folder = write_evaluation(tmp_path / "report", record | {"limit": 2})
    card = build_card(converted, NAME, evaluation=folder)
    found = check_card(card)["Benchmarks"]
    assert "> **NOT COMPARABLE: --limit 2 scored at most 2 item(s)" in found
    assert "Left out of the card's model-index" in found
    assert "**ONLY 2 ITEMS A TASK (--limit): This model averages" in card
    write_evaluation(folder, record | {"partial_data": ["B"], "errors": [_error("/Users/me/data is not there")]})
    found = check_card(build_card(converted, NAME, evaluation=folder))["Benchmarks"]
    assert "> **NOT COMPARABLE with published figures" in found
    assert "> **FAILED: C on model (data is not there).**" in found


def _error(error: str) -> dict[str, str]:
    return {"model": "model", "benchmark": "C", "error": error}


def test_an_evaluation_of_another_model_is_refused(converted: Path, tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "report", make_record({"model": ("other", 0.9)}).content())
    with pytest.raises(UserError, match="scored other weights than those in"):
        build_card(converted, NAME, evaluation=folder)


def test_a_model_from_scratch(folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "out/initial", objective={"kind": "cross_entropy"})
    model = shutil.copytree(folder, run / "model")
    sections = check_card(build_card(model, NAME))
    assert "No base: the weights were drawn at random" in sections["Base model and licence"]
    assert "There was no conversion to prove" in sections["Conversion proof"]
    assert "Held-out text" in sections and "Text it was converted with" not in sections
    alone = check_card(build_card(folder, NAME))
    assert "No base is on record" in alone["Base model and licence"] and "Not proven" in alone["Conversion proof"]


def test_files_of_one_name_are_told_apart(converted: Path) -> None:
    conversion = json.loads((converted / "conversion.json").read_text())
    sources = {"/data/en/x.jsonl": 0.75, "/data/de/x.jsonl": 0.25}
    read = {"tokens": 512, "tokens_of_source": dict(zip(sources, (384, 128), strict=True)), "sources": sources}
    change(converted / "conversion.json", calibration=conversion["calibration"] | read)
    text = check_card(build_card(converted, NAME))["Text it was converted with"]
    assert "en/x.jsonl (75.00 %), de/x.jsonl (25.00 %)" in text and "/data" not in text


def test_missing_records_are_told(converted: Path) -> None:
    change(converted / "conversion.json", verification=None, calibration=None, arithmetic=None)
    sections = check_card(build_card(converted, NAME))
    assert "**Not proven: the record of the conversion has no verification" in sections["Conversion proof"]
    assert "fitted nothing to text" in sections["Text it was converted with"]


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("plan", [], "has plan = []: Input should be a valid dictionary"),
        ("plan", {"preset": 3}, "has plan.preset = 3: Input should be a valid string"),
        ("arithmetic", {"parameters": 5}, "has arithmetic.parameters = 5: Input should be a valid dictionary"),
        ("arithmetic", {"parameters": {"dense": 5}}, "lacks arithmetic.parameters.moh"),
        ("base", {"name": None}, "has base.name = None: Input should be a valid string"),
        ("base", None, "lacks base"),
        ("calibration", {"tokens": "9", "mixture": "m", "sources": {}}, "has calibration.tokens = '9'"),
        ("verification", {"all_heads_active": True}, "lacks verification.dtype"),
    ],
)
def test_a_malformed_record_of_the_conversion_is_one_line(
    converted: Path, part: str, value: object, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(converted / "conversion.json", **{part: value})
    assert main(["publish", str(converted), "--repo-id", NAME, "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{converted / 'conversion.json'} {told}" in line and line.endswith("; convert the model again")


@pytest.mark.parametrize("entries", [{}, [{"kind": "dream"}], [{"kind": "run", "tokens": 5}], [5]])
def test_a_malformed_lineage_is_one_line(converted: Path, entries: object, capsys: pytest.CaptureFixture[str]) -> None:
    change(converted / "lineage.json", entries=entries)
    assert main(["publish", str(converted), "--repo-id", NAME, "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(converted / "lineage.json") in line and "entries" in line


def test_what_was_forced_stands_at_the_top(converted: Path) -> None:
    card = build_card(converted, NAME, forced=["proof: logits differ by 0.5 in /tmp/x/y", "check: a [b](c) # d"])
    assert card.index("PUBLISHED WITH RESERVATIONS") < card.index("## ")
    found = check_card(card)["Reservations"]
    assert "- proof: logits differ by 0.5 in y\n" in found and r"- check: a \[b\](c) \# d" in found


EVIL = "x`y|z**\n---\nlicense: mit\n---\n# Pwned\n<script>alert(1)</script> [a](http://b) {{ 7*7 }} {% raw %}"


def test_hostile_names_stay_text(tuned: Path, tmp_path: Path) -> None:
    clean = set(check_card(build_card(tuned, NAME, forced=["x"])))
    conversion = json.loads((tuned / "conversion.json").read_text())
    change(
        tuned / "conversion.json",
        base={"name": EVIL, "revision": None, "fingerprint": EVIL},
        calibration=conversion["calibration"] | {"mixture": EVIL, "sources": {EVIL: 1.0}},
        plan=conversion["plan"] | {"preset": EVIL},
        moh_llm=EVIL,
    )
    read = {"weight": 1.0, "tokens": 192, "share": 1.0, "epochs": 0.5, "repeated_tokens": 0}
    data = {"mixture": EVIL, "sequence_length": 16, "batch_size": 2}
    write_run(tuned.parent, EVIL, record={"data_read": {EVIL: read}, "device": EVIL}, data=data)
    record = make_record({"base": ("b", 1.0), EVIL: (identify(str(tuned)), 0.9)}).content()
    record["suite"]["title"] = record["suite"]["name"] = EVIL
    record["benchmarks"][0] |= {"name": EVIL, "metric": EVIL, "dataset": EVIL}
    record["benchmarks"][0]["scores"][EVIL]["truncated"] = True
    folder = write_evaluation(tmp_path / "report", record | {"errors": [_error(EVIL) | {"model": EVIL}]})
    card = build_card(tuned, NAME, evaluation=folder, forced=[EVIL])
    assert set(check_card(card)) == clean
    spans = ModelCard(card).text.replace(r"\`", "").split("`")
    in_code, in_text = spans[1::2], spans[::2]
    assert any("<script>" in part for part in in_code) and not any("<script" in part for part in in_text)
    assert "{{ 7\\*7 }} {% raw %}" in card
    assert ModelCard(card).data.license == "mit" and ModelCard(card).data.base_model is None


def test_long_lists_stay_readable(tuned: Path) -> None:
    read = {"weight": 0.005, "share": 0.005, "epochs": 0.5, "repeated_tokens": 1}
    sources = {f"/data/source-{number}": read | {"tokens": 1000 - number} for number in range(200)}
    write_run(tuned.parent, "gone", record={"data_read": sources})
    log = [{"step": n, "tokens": n, "validation": {"perplexity": 1.0, "tokens": 1, "documents": 1}} for n in range(900)]
    (tuned.parent / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    sections = check_card(build_card(tuned, NAME))
    assert "| 160 others | 80.00% | 80.00% |" in sections["Text it was trained on"]
    assert sections["Recovery"].count("\n|") == 2 + 12 + 1


@pytest.mark.parametrize("repo_id", ["a/b/c", "a b", "", "../x", "a/b\n# c"])
def test_bad_ids_and_folders_are_refused(converted: Path, repo_id: str) -> None:
    with pytest.raises(UserError, match="is no repository's id"):
        build_card(converted, repo_id)


def test_another_architecture_is_refused(converted: Path) -> None:
    change(converted / "config.json", model_type="llama")
    with pytest.raises(UserError, match="has model_type=llama, not moh_llama"):
        build_card(converted, NAME)


@pytest.mark.parametrize("fallback", ["value", "local"])
@pytest.mark.parametrize("revision", [None, "step-1", "a'b;c"])
def test_what_a_card_tells_to_run_is_as_it_is_typed(fallback, revision, folder):
    """No word of a command is Markdown's escape of one; the Python is Python."""
    if fallback == "local":
        change(folder / "config.json", head_fallback="local", router_type="threshold", num_shared_heads=1)
    for repo_id in ("org/my_model_1", None):
        card = build_card(folder, repo_id, revision=revision if repo_id else None, licence="apache-2.0")
        blocks = re.findall(r"```(\w+)\n(.*?)```", card, re.DOTALL)
        commands = [line for kind, block in blocks if kind == "bash" for line in block.splitlines() if line]
        assert len(commands) == 1 and "\\" not in commands[0]
        vllm = argparse.ArgumentParser(exit_on_error=False)
        vllm.add_argument("call", nargs=2)
        vllm.add_argument("model")
        for flag in ("--enforce-eager", "--trust-remote-code"):
            vllm.add_argument(flag, action="store_true")
        vllm.add_argument("--model-impl", choices=["transformers"])
        vllm.add_argument("--revision")
        found = vllm.parse_args(shlex.split(commands[0]))
        assert (found.call, found.model) == (["vllm", "serve"], repo_id or "path/to/this/folder")
        assert found.enforce_eager == (fallback == "local") and found.revision == (revision if repo_id else None)
        assert {kind for kind, _ in blocks} <= {"bash", "python", "bibtex"}
        (python,) = [block for kind, block in blocks if kind == "python"]
        calls = [node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call)]
        revisions = {ast.literal_eval(word.value) for call in calls for word in call.keywords if word.arg == "revision"}
        assert revisions == ({revision} if repo_id and revision else set())
