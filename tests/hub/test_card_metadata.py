"""The front matter of model cards: what the Hub reads, and what its validator would say."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from cards import change, check_card, write_evaluation, write_run
from huggingface_hub import ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.repocard_data import model_index_to_eval_results
from records import make_record

from moh_llm.hub.card import build_card
from moh_llm.hub.lineage import is_hub_id
from moh_llm.records.identity import identify

NAME = "someone/Tiny-MoH"


def refusals(data: dict[str, Any]) -> list[str]:
    """What the Hub's validator refuses, as far as its documentation and its answers tell."""
    found = [f"{key} is empty" for key, value in data.items() if value in (None, [], "")]
    for key in ("base_model", "datasets"):
        ids = data.get(key, [])
        found += [f"{key}: {name!r}" for name in ([ids] if isinstance(ids, str) else ids) if not is_hub_id(name)]
    for entry in data.get("model-index", []):
        for result in entry["results"]:
            texts = [entry["name"], result["task"]["type"], *result["dataset"].values()]
            texts += [metric[key] for metric in result["metrics"] for key in ("type", "name")]
            found += [f"{value!r} must be a string" for value in texts if not isinstance(value, str)]
            found += ["no value" for metric in result["metrics"] if not isinstance(metric["value"], float)]
    return found


def metadata(card: str) -> dict[str, Any]:
    """The front matter as YAML, the same as the library makes of it, in which the Hub finds nothing to refuse."""
    block = REGEX_YAML_BLOCK.search(card)
    assert block is not None
    data = yaml.safe_load(block[2])
    assert ModelCard(card).data.to_dict() == data and not refusals(data)
    return data


def write_conversion(folder: Path, name: str, revision: str | None) -> None:
    (folder / "conversion.json").write_text(
        json.dumps({"base": {"name": name, "revision": revision, "dense_sha256": "0"}})
    )


def test_a_local_base_is_not_named_to_the_hub(folder: Path) -> None:
    # It looks like an id, but no commit was recorded, so it was a folder.
    write_conversion(folder, "out/base", None)
    card = build_card(folder, NAME)
    assert metadata(card) == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["mixture-of-head", "moh"],
    }
    assert "Base: `base`, a local folder" in check_card(card)["How it was made"]
    write_conversion(folder, "org/base", "c" * 40)
    data = metadata(build_card(folder, NAME))
    assert (data["base_model"], data["base_model_relation"]) == ("org/base", "finetune")


def test_datasets_are_those_of_the_hub_that_were_read(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    files = {
        "web": "hf://datasets/org/web@abc/data/0.parquet",
        "local": "/data/a.jsonl",
        "unread": "hf://datasets/org/unread@abc/x.jsonl",
        "bad": "hf://datasets/or g/--/x.jsonl",
    }
    source = {"documents": 1, "tokens": 1, "weight": 0.25, "shards": {}}
    text = {"bytes": 1, "modified": None}
    sources = {name: source | {"text": [text | {"file": file}] * 2} for name, file in files.items()}
    tokenizer = {"name": "t", "sha256": "0", "vocab_size": 9, "end_of_document": None, "dtype": "uint16"}
    record = {"name": "m", "validation_share": 0.1, "tokenizer": tokenizer, "tokens": 4, "sources": sources}
    record["status"] = "finished"
    (tokens / "mixture.json").write_text(json.dumps(record))
    read = {"weight": 0.3, "share": 0.3, "epochs": 0.5, "repeated_tokens": 0}
    receipt = {name: read | {"tokens": 0 if name == "unread" else 64} for name in files}
    run = write_run(tmp_path / "run", "gone", record={"tokens_in": str(tokens), "data_read": receipt})
    write_conversion(folder, "base", None)
    model = shutil.copytree(folder, run / "model")
    assert metadata(build_card(model, NAME))["datasets"] == ["org/web"]
    change(tokens / "mixture.json", sources={"other": sources["web"]})
    assert "datasets" not in metadata(build_card(model, NAME))


def test_model_index_holds_the_reports_numbers(folder: Path, tmp_path: Path) -> None:
    record = make_record({"base": ("b", 1.0), "model": (identify(str(folder)), 0.9)}).content()
    record["benchmarks"][0]["metric"] = "exact_match (strict-match)"
    record["benchmarks"][0]["shots"] = 8
    record["benchmarks"][1]["scores"]["model"]["value"] = 100 / 3  # more digits than a page shows
    del record["benchmarks"][2]["scores"]["model"]
    place = write_evaluation(tmp_path / "report", record)
    card = build_card(folder, NAME, evaluation=place)
    name, results = model_index_to_eval_results(metadata(card)["model-index"])
    report = json.loads((place / "report.json").read_text())
    assert name == "Tiny-MoH"
    assert {r.dataset_name: r.metric_value for r in results} == {
        row["name"]: row["scores"]["model"]["value"] for row in report["benchmarks"] if "model" in row["scores"]
    }
    first = results[0]
    assert (first.metric_type, first.metric_name) == ("exact_match", "exact_match (strict-match), 8-shot")
    assert (first.dataset_type, first.dataset_split, first.dataset_revision) == ("A", "test", "0" * 40)
    assert first.dataset_config == "A" and not any(result.verified for result in results)


def test_datasets_and_names_in_the_model_index(folder: Path, tmp_path: Path) -> None:
    record = make_record({"model": (identify(str(folder)), 0.9)}).content()
    for row in record["benchmarks"][:2]:
        row |= {"dataset": "org/both", "dataset_config": "main"}
    record["benchmarks"][2] |= {"name": "[C](http://x) <b>`c`</b>\n**d**", "metric": "acc|<i>", "eval_split": "te<st"}
    card = build_card(folder, NAME, evaluation=write_evaluation(tmp_path / "report", record))
    both, third = metadata(card)["model-index"][0]["results"]
    assert [metric["name"] for metric in both["metrics"]] == ["A: acc, 0-shot", "B: acc, 0-shot"]
    texts = [*third["dataset"].values(), *third["metrics"][0].values()]
    assert not [text for text in map(str, texts) if re.search(r"[<>`|*\[\]\n]", text)]


def test_scores_of_few_or_some_items_are_no_results(folder: Path, tmp_path: Path) -> None:
    record = make_record({"model": (identify(str(folder)), 0.9)}).content()
    place = write_evaluation(tmp_path / "report", record | {"limit": 100})
    assert "model-index" not in metadata(build_card(folder, NAME, evaluation=place))
    record["benchmarks"][0]["items_in_full"] = 30
    write_evaluation(place, record | {"partial_data": ["C"]})
    card = build_card(folder, NAME, evaluation=place)
    (index,) = metadata(card)["model-index"]
    assert [result["dataset"]["name"] for result in index["results"]] == ["B"]
    assert "fewer than 100 items: A (200 items), C (200 items)" in card
