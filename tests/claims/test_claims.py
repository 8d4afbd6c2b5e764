"""Claims by kind of model: each says what its records hold, and nothing where they do not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cards import change, check_card, write_evaluation, write_run
from huggingface_hub import ModelCard
from records import make_record

from moh_llm.claims import ModelRecords, claims_of
from moh_llm.claims.heads import all_heads_on_prompts
from moh_llm.claims.training import weights_changed, weights_trained
from moh_llm.commands.convert import print_conversion
from moh_llm.hub.card import build_card
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import read_conversion
from moh_llm.records.identity import identify
from moh_llm.records.lineage import Chain, RunEntry, read_chain
from moh_llm.records.run import RunRecord

FLAGS = ["--fallback", "local", "--router", "threshold", "--local-window", "8", "--context", "128", "--keys", "0.7"]


@pytest.fixture(scope="module")
def threshold(make_llama: Callable[..., Path], convert: Callable[..., int], made_once: Any) -> Path:
    """A model with local fallbacks and threshold routers, of a base without a licence; not to be changed."""
    base = make_llama(num_attention_heads=8, hidden_size=64, max_position_embeddings=128)
    return made_once("threshold", lambda folder: convert(base, folder, *FLAGS, "--overwrite"))


@pytest.fixture
def folder(threshold: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(threshold, tmp_path / "moh"))


def records_of(folder: Path, **more: Any) -> ModelRecords:
    config = MoHLlamaConfig.from_pretrained(folder)
    return ModelRecords(config=config, conversion=read_conversion(folder), chain=read_chain(folder), **more)


def entry_of(chain: Chain, dense: str | None = None, routing: str | None = None) -> RunEntry:
    """A run that changes the hashes that are given."""
    before = chain.entries[-1].made
    changes = {name: value for name, value in (("dense", dense), ("routing", routing)) if value}
    made = before.model_copy(update=changes)
    about = {"objective": "distillation", "tokens": 61440, "steps": 30, "mixture": "tiny", "seed": 0, "teacher": "base"}
    return RunEntry(kind="run", lora_rank=None, began_with=before, made=made, **about)


def test_heads_are_asked_for_and_read(folder: Path, tmp_path: Path) -> None:
    """On the held-out text, on the prompts of benchmarks, in training: each by its own record."""
    config = MoHLlamaConfig.from_pretrained(folder)
    layers = json.loads((folder / "conversion.json").read_text())["verification"]["layers"]
    read = sum(sum(layer["head_load"]) for layer in layers) / len(layers)
    asked = sum(config.active_heads_per_layer) / len(layers)
    record = make_record({"model": (identify(str(folder)), 0.9)}).content()
    record["analysis"] = {"model": {"head_load": {"load": [[0.5] * 8, [1.0] * 8], "tokens": 1234}, "seconds": []}}
    found = write_evaluation(tmp_path / "report", record)
    claims = claims_of(records_of(folder))
    assert claims["heads_read"].figures == {"conversion.verification.heads_read": pytest.approx(read)}
    assert claims["heads_asked"].figures["config.num_active_heads"] == pytest.approx(asked)
    assert abs(read - asked) > 0.05 and "heads_read_on_prompts" not in claims
    card = build_card(folder, None, evaluation=found)
    assert f"asks for {asked:.4g} of 8" in card and f"held-out text had {read:.4g} of 8" in card
    assert "had 6 of 8 heads on (75.0%)" in card and "1,234 tokens of the benchmarks' first prompts" in card


def test_prompts_that_have_all_heads_on_are_told(folder: Path, tmp_path: Path) -> None:
    """With local fallbacks: prompts that are no longer than a document's first tokens, which have all heads on."""
    record = make_record({"model": (identify(str(folder)), 0.9)}).content()
    by_text = {"load": {"A": [1.0] * 8, "B": [1.0] * 7 + [0.9], "C": [1.0] * 8}}
    told = {64: ["A", "C"], 0: None}
    for start, names in told.items():
        record["analysis"] = {"model": {"all_heads_until": start, "head_load_by_text": by_text, "seconds": []}}
        card = build_card(folder, None, evaluation=write_evaluation(tmp_path / "report", record))
        claim = all_heads_on_prompts(record["analysis"]["model"], "model")
        assert (claim and claim.figures["analysis.model.head_load_by_text.load"]) == names
        assert claim is None or claim.text in card


@pytest.mark.parametrize("router", ["threshold", "none"])
def test_local_fallbacks_have_all_heads_on_at_first(folder: Path, router: str) -> None:
    """The plan asks nothing of a document's first tokens, nor of heads that are never on."""
    plan = {"num_shared_heads": 3, "num_active_heads": 3, "shared_heads": None, "local_window": 8, "local_sinks": 4}
    change(folder / "config.json", router_type=router, local_start=20, never_on_heads=[[6, 7], [7]], **plan)
    claims, card = claims_of(records_of(folder)), build_card(folder, None)
    for name in ("heads_asked", "theoretical_cost"):
        assert claims[name].figures["config.all_heads_until"] == 20 and "first 20 tokens" in claims[name].text
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", check_card(card)["Head plan"], re.MULTILINE)
    told = dict(rows)
    assert told["first tokens of a document, with all heads on"] == "20"
    never = "5 per layer" if router == "none" else "layer 0: 2; layer 1: 1"
    assert told["heads that are never on after these first tokens"] == never
    assert "first 4 tokens" in told["fallbacks"] and "last 8" in told["fallbacks"] and "{" not in told["fallbacks"]
    assert ("routing granularity" in told) == (router != "none") == ("how this model chooses" in card)


@pytest.mark.parametrize(("shared", "told"), [([[0, 5], []], "shared by layer: 2 0 ("), ([[1], [4]], " 1 shared (")])
def test_shared_heads_are_no_mean_over_layers(folder: Path, shared: list[list[int]], told: str, capsys: Any) -> None:
    record = read_conversion(folder)
    assert record is not None and record.plan is not None
    record.plan.shared_heads = shared
    print_conversion(record, folder)
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("dense", [None, "other"])
def test_what_was_proved_holds_while_the_dense_weights_are_the_same(folder: Path, dense: str | None) -> None:
    chain = read_chain(folder)
    chain = chain.with_entry(entry_of(chain, dense, "routing"))
    records = ModelRecords(MoHLlamaConfig.from_pretrained(folder), read_conversion(folder), chain)
    claim = claims_of(records)["all_heads_on"]
    assert claim.figures["chain.dense_kept"] == (dense is None)
    assert ("it holds of this model, too" in claim.text) == (dense is None)
    assert ("changed the dense weights" in claim.text) == (dense is not None)
    assert "changed the dense weights" not in claims_of(records_of(folder))["all_heads_on"].text


def test_a_tuned_model_that_is_converted_again(folder: Path) -> None:
    """Training came before: tokens are on record, and nothing was trained since."""
    chain = read_chain(folder)
    before = entry_of(chain, "dense")
    again = chain.entries[0].model_copy(update={"dense_sha256": "dense"})
    change(folder / "lineage.json", **Chain(entries=[*chain.entries, before, again]).content())
    sections = check_card(build_card(folder, None))
    assert "61,440 tokens in all" in sections["Text it was trained on"]
    assert "No training run is on record" not in sections["Text it was trained on"]
    assert "before it was trained" not in sections["Conversion proof"] and "No training since" in sections["Limits"]


def test_nothing_was_trained_where_the_dense_weights_are_the_bases(folder: Path) -> None:
    records = records_of(folder)
    claim = claims_of(records)["text_of_training"]
    assert claim.figures["chain.dense_of_base"] is True and "SHA-256" in claim.text
    assert records.conversion is not None
    other = records.conversion.model_copy(update={"base": records.conversion.base.model_copy()})
    other.base.dense_sha256 = "other"
    claim = claims_of(ModelRecords(records.config, other, records.chain))["text_of_training"]
    assert claim.figures["chain.dense_of_base"] is False and "SHA-256" not in claim.text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/srv/out/recovery/model", "recovery/model"),
        ("recovery/model/", "recovery/model"),
        ("../model", "model"),
        ("model", "model"),
        ("/srv/models/base", "base"),
        ("C:\\runs\\first\\model", "first/model"),
    ],
)
def test_a_model_of_a_run_goes_by_the_run(folder: Path, name: str, shown: str) -> None:
    record = json.loads((folder / "conversion.json").read_text())
    change(folder / "conversion.json", base=record["base"] | {"name": name})
    claims = claims_of(records_of(folder))
    assert claims["origin"].figures == claims["faults_of_the_base"].figures == {"conversion.base.name": shown}
    assert f"Base: `{shown}`, a local folder" in build_card(folder, None)


def test_a_run_changed_the_weights_whose_hashes_differ(folder: Path) -> None:
    chain = read_chain(folder)
    told = {
        "nothing": entry_of(chain),
        "routers or fallbacks": entry_of(chain, routing="a"),
        "dense weights and routers or fallbacks": entry_of(chain, "a", "a"),
    }
    for text, entry in told.items():
        assert weights_changed(entry).text == f"changed: {text}"


def test_a_run_trained_the_weights_that_had_a_gradient(folder: Path, tmp_path: Path) -> None:
    """A threshold router is not trained, so it has no rate and no load-balance weight."""
    parameters = {"trained": 30, "total": 50, "trained_base": 20, "trained_routers": 0, "trained_fallbacks": 10}
    claim = weights_trained(parameters, {})
    assert claim.text == "20 of the dense model, 10 of fallbacks"
    run = write_run(tmp_path / "run", str(folder), record={"parameters": parameters, "balance_coefficient": None})
    model = Path(shutil.copytree(folder, run / "model"))
    training = check_card(build_card(model, None))["Training"]
    assert "| weights trained | 20 of the dense model, 10 of fallbacks |" in training
    assert "router" not in training and "load-balance" not in training and "of fallbacks |" in training
    change(run / "run.json", parameters=parameters | {"trained_routers": 5}, balance_coefficient=0.01)
    training = check_card(build_card(model, None))["Training"]
    assert "of routers and fallbacks |" in training and "| load-balance weight | 0.01 |" in training
    assert RunRecord.read(run / "run.json").balance_coefficient == 0.01


def test_a_licence_is_of_the_base_only_where_the_base_has_one(folder: Path) -> None:
    card = build_card(folder, "me/toy", licence="mit")
    assert (
        "`mit`" in card and "inherited" not in card and "of the base" not in card.split("Licence: ")[1].split("\n")[0]
    )


def test_times_are_those_that_were_measured(folder: Path, tmp_path: Path) -> None:
    """And without any nothing is said of speed."""
    record = make_record({"model": (identify(str(folder)), 0.9)}).content()
    seconds = [{"length": 128, "moh": 2.23, "dense": 1.0}, {"length": 512, "moh": 1.23, "dense": 1.0}]
    record["analysis"] = {"model": {"seconds": seconds}}
    card = build_card(folder, None, evaluation=write_evaluation(tmp_path / "report", record))
    assert "takes 2.23 times as long as with every head on at 128 tokens and 1.23 at 512 (" in card
    for text in (card, build_card(folder, None)):
        assert "no faster. " not in text and "Short texts" not in text and "longer text was not tried" not in text
        assert "SGLang" not in text
    claim = claims_of(records_of(folder))["longest_text"]
    assert claim.figures == {"config.max_position_embeddings": 128, "conversion.plan.context": 128}


def test_few_items_are_no_result(folder: Path, tmp_path: Path) -> None:
    record = make_record({"model": (identify(str(folder)), 0.9)}).content()
    record["benchmarks"][0]["items_in_full"] = 30
    card = build_card(folder, None, evaluation=write_evaluation(tmp_path / "report", record))
    names = [result.dataset_name for result in ModelCard(card).data.eval_results]
    assert names == ["B", "C"] and "fewer than 100 items: A (200 items)" in card


def test_names_in_the_metadata_are_plain(folder: Path, tmp_path: Path) -> None:
    record = make_record({"model": (identify(str(folder)), 0.9)}).content()
    record["benchmarks"][0] |= {"name": "[A](http://x) <b>`c`</b>\n**d**", "metric": "acc|<i>", "eval_split": "te<st"}
    card = build_card(folder, None, evaluation=write_evaluation(tmp_path / "report", record))
    (first, *_) = ModelCard(card).data.to_dict()["model-index"][0]["results"]
    texts = [*first["dataset"].values(), *first["metrics"][0].values()]
    assert not [text for text in map(str, texts) if re.search(r"[<>`|*\[\]\n]", text)]


def test_weights_of_routers_and_of_fallbacks_are_told_apart(folder: Path) -> None:
    parameters = json.loads((folder / "conversion.json").read_text())["arithmetic"]["parameters"]
    assert f"{parameters['routers']:,} of routers and {parameters['fallbacks']:,} of fallbacks" in build_card(
        folder, None
    )


def test_what_was_not_trained_is_not_said_to_have_changed(threshold: Path) -> None:
    entry = entry_of(read_chain(threshold), routing="9" * 64)
    for trained, text in (
        ({"trained_routers": 0, "trained_fallbacks": 7}, "changed: fallbacks"),
        ({"trained_routers": 7, "trained_fallbacks": 0}, "changed: routers"),
        ({"trained_routers": 7, "trained_fallbacks": 7}, "changed: routers or fallbacks"),
        (None, "changed: routers or fallbacks"),
        ({"trained": 14}, "changed: routers or fallbacks"),
    ):
        assert weights_changed(entry, trained).text == text
