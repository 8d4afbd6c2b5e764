"""`moh-llm publish` of models of images: what is sent, what the card says, and what stops it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from cards import check_card
from huggingface_hub import ModelCard
from PIL import Image
from tiny_images import ROUTED, recipe, save_dit, save_vit, write_idx

import moh_llm
from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.hub.card import build_card
from moh_llm.hub.checks import check_files
from moh_llm.hub.proof import encode_images, observe_images, prove
from moh_llm.records.seal import find_changes, read_seal
from moh_llm.vision import CODE, load_model
from moh_llm.vision.images import open_images

PROCESSOR = {"size": 8, "crop_size": 8, "image_mean": [0.4], "image_std": [0.5], "do_convert_rgb": False}
LICENCE = "---\nlicense: mit\n---\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders by name, not to be changed: `vit` and `dit`, converted from `vit-base` and `dit-base`, and `images`."""
    place = tmp_path_factory.mktemp("images")
    images = write_idx(place / "images", 40)

    def make(name: str) -> Path:
        if name == "images" or (place / name).exists():
            return images if name == "images" else place / name
        base = place / f"{name}-base"
        if name == "dit":
            pytest.importorskip("diffusers")
            save_dit(base)
        else:
            size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
            size |= {"num_labels": 3, "image_size": 8, "patch_size": 4, "num_channels": 1, "initializer_range": 0.3}
            torch.manual_seed(0)
            transformers.ViTForImageClassification(transformers.ViTConfig(**size)).save_pretrained(base)
            (base / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        (base / "README.md").write_text(LICENCE)
        moh_llm.convert(base, place / name, calibration=images, num_active_heads=2)
        return place / name

    return make


def publish(folder: Path, *flags: str) -> int:
    return main(["publish", str(folder), "--repo-id", "org/moh", *flags])


def test_a_vit_is_sent_with_its_code_and_a_card_that_runs(made, fake_hub, forked_proof, tmp_path, monkeypatch, capsys):
    folder, report = made("vit"), tmp_path / "report"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    record = moh_llm.evaluate(folder, base=made("vit-base"), data_dir=made("images"), output_dir=report)
    assert publish(folder, "--evaluation", str(report)) == 0
    assert re.search(r"the outputs for 3 images equal the local model's bit for bit", capsys.readouterr().out)
    sent = fake_hub.branches["org/moh"]["main"]
    assert set(sent) == {*before, ".gitattributes", "evaluation.json"}
    assert {"preprocessor_config.json", "conversion.json", *CODE} <= set(sent)
    assert str(folder.parent).encode() not in b"".join(sent.values())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    card = sent["README.md"].decode()
    data, sections = ModelCard(card).data, check_card(card)
    assert (data.pipeline_tag, data.library_name, data.license) == ("image-classification", "transformers", "mit")
    plan = json.loads(sent["config.json"])["num_active_heads"]
    assert f"on by layer: {' '.join(map(str, plan))}" in sections["What it keeps"] and sum(plan) == 4
    figures = json.loads(sent["conversion.json"])["images"]
    assert f"squared error {figures['error']:.2%}" in sections["What it keeps"]
    for name in ("top1", "top5"):
        figure = {kind: f"{found['value']:.4f}" for kind, found in record["models"]["model"]["scores"][name].items()}
        base = f"{record['models']['base']['scores'][name]['value']['value']:.4f}"
        row = re.search(rf"\| {name} \| (.*) \|", sections["Scores"])[1]
        assert re.findall(r"(?:^|\| )(-?\d\.\d{4})", row) == [
            figure["value"],
            base,
            figure["difference"],
            figure["ratio"],
        ]
    [code] = re.findall(r"```python\n(.*?)```", sections["How to load"], re.DOTALL)
    Image.new("RGB", (20, 9), "red").save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    exec(code.replace('"org/moh"', repr(str(folder))), said := {})
    assert capsys.readouterr().out.strip() in said["model"].config.id2label.values()


@pytest.mark.slow  # the clean process imports diffusers and this package
def test_a_dit_is_sent_once_a_process_with_this_package_has_loaded_it(made, fake_hub, forked_proof, capsys):
    assert publish(made("dit"), "--licence", "mit") == 0
    assert "in a clean process, with moh_llm" in capsys.readouterr().out
    sent = fake_hub.branches["org/moh"]["main"]
    assert not [name for name in sent if name.endswith(".py")] and b"needs MoH-LLM" in sent["README.md"]


def test_the_card_of_a_dit_says_what_it_needs(made):
    card = build_card(made("dit"), "org/moh")
    load, data = check_card(card)["How to load"], ModelCard(card).data
    assert "needs MoH-LLM" in load and 'MoHDiTTransformer2DModel.from_pretrained("org/moh")' in load
    assert data.library_name == "diffusers" and data.pipeline_tag is None


def _move(tensor: torch.Tensor) -> None:
    """Change the largest element by one unit in the last place."""
    flat = tensor.view(-1)
    place = int(flat.abs().argmax())
    flat[place] = torch.nextafter(flat[place], torch.tensor(torch.inf))


@pytest.mark.parametrize("name", ["vit", "dit"])
def test_what_is_observed_shows_every_matrix(made, name):
    """And not a router's by too little to switch a head, nor the classes of a DiT that no image has."""
    folder = made(name)
    model = load_model(folder)
    batch = encode_images(folder, model.config)
    before = observe_images(model, batch)
    assert {len(part) for part in batch.values()} == {3}
    for weight, parameter in model.named_parameters():
        if "router" in weight:
            continue
        old = parameter.data.clone()
        parameter.data *= 1.001
        after = observe_images(model, batch)
        changed = any(not torch.equal(after[key], tensor) for key, tensor in before.items())
        # A DiT's first layers have no bias that the following norm leaves.
        assert changed or not old.any(), weight
        parameter.data.copy_(old)


@pytest.mark.parametrize("how", ["weight", "processor"])
def test_what_changes_on_the_way_is_found(made, how, forked_proof, tmp_path):
    folder = Path(shutil.copytree(made("vit"), tmp_path / "vit"))
    if how == "weight":
        model = load_model(folder)
        with torch.no_grad():
            _move(model.classifier.weight)
        (folder / "model.safetensors.index.json").unlink()
        for shard in folder.glob("*.safetensors"):
            shard.unlink()
        model.save_pretrained(folder)
        expected = r"logits\.\w+ differs from the local model's by up to"
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"image_mean": [0.41]}))
        expected = r"pixel_values differs from the local model's by up to"
    assert re.match(expected, prove(folder, made("vit")).failure)


@pytest.mark.parametrize("how", ["changed", "of text", "of the processor"])
def test_other_code_is_refused_before_it_runs(made, how, tmp_path):
    folder = Path(shutil.copytree(made("vit"), tmp_path / "vit"))
    assert check_files(folder) == []
    name = "modeling_moh_vit.py"
    if how == "changed":
        with (folder / name).open("a") as file:
            file.write("\n")
    elif how == "of text":
        name = "attention_moh.py"
        shutil.copy(Path(moh_llm.__file__).parent / "modeling" / name, folder)
    else:
        name = "preprocessor_config.json"
        (folder / name).write_text(json.dumps(PROCESSOR | {"auto_map": {"AutoImageProcessor": "own.Own"}}))
    [problem] = check_files(folder)
    assert problem.startswith(f"{name}: ") and "not code of moh-llm" in problem


def test_a_tuned_model_has_the_files_of_one_of_text_and_is_published_by_its_run(made, fake_hub, proven, tmp_path):
    how = {"hub__repo_id": "org/tuned", "images__held_out": str(made("images")), "checkpoint__save_steps": 4}
    record = moh_llm.train(recipe(made("vit"), tmp_path / "run", made("images"), **how))
    model = tmp_path / "run" / "model"
    assert find_changes(model, read_seal(model)) == {} and "README.md" in read_seal(model).files
    [conversion, run] = json.loads((model / "lineage.json").read_text())["entries"]
    assert (run["tokens"], run["steps"], run["teacher"], run["mixture"]) == (16, 4, "start", "images-idx3-ubyte")
    assert run["began_with"] == conversion["made"] and run["made"] == record.made.model_dump(mode="json")
    sections = check_card((model / "README.md").read_text())
    shown = re.search(r"- tuned, on 40 held-out images: task_loss ([\d.e-]+), top1 ([\d.]+)", sections["What it keeps"])
    assert [float(value) for value in shown.groups()] == [
        pytest.approx(record.held_out[name], rel=1e-3) for name in ("task_loss", "top1")
    ]
    assert "as converted, as planned: squared error" in sections["What it keeps"]
    assert "16 training images in all" in sections["How it was made"]
    assert (
        "| 2 | distillation, teacher: the model it began with, all heads on | 16 | 4 |" in sections["How it was made"]
    )
    assert b"16 training images" in fake_hub.branches["org/tuned"]["main"]["README.md"]
    # A run that begins with the tuned model goes on with its lineage.
    moh_llm.train(recipe(model, tmp_path / "more", made("images"), base=str(made("vit-base")), max_steps=1))
    entries = json.loads((tmp_path / "more" / "model" / "lineage.json").read_text())["entries"]
    assert [entry.get("teacher") for entry in entries] == [None, "start", "named"]


def test_models_and_reports_that_do_not_fit_are_refused_in_one_line(made, tmp_path, capsys):
    def refused(folder: Path, *flags: str) -> str:
        assert publish(folder, "--dry-run", *flags) == 2
        return capsys.readouterr().err

    assert "has model_type=vit, not moh_llama; convert it first" in refused(made("vit-base"))
    other = save_vit(tmp_path / "other")
    moh_llm.evaluate(other, data_dir=made("images"), output_dir=tmp_path / "report")
    flags = ("--evaluation", str(tmp_path / "report"))
    assert "scored other models than the one in" in refused(made("vit"), *flags)
    (tmp_path / "report" / "report.json").write_text('{"models": {}, "benchmarks": []}')
    assert "is not the report of an evaluation on images" in refused(made("vit"), *flags)


def test_a_dense_model_of_a_run_has_no_card(made, tmp_path, capsys):
    how = {"objective__kind": "cross_entropy", "max_steps": 1}
    moh_llm.train(recipe(made("vit-base"), tmp_path / "run", made("images"), **how))
    assert not (tmp_path / "run/model/README.md").exists() and "was not written" not in capsys.readouterr().out
    with pytest.raises(UserError, match="has model_type=vit, not moh_llama"):
        moh_llm.train(recipe(made("vit-base"), tmp_path / "two", made("images"), hub__repo_id="org/moh", **how))


@pytest.mark.parametrize("name", ["vit", "dit"])
def test_the_hub_gets_the_scores_of_the_report(name, tmp_path, monkeypatch):
    if name == "dit":
        pytest.importorskip("diffusers")
    model = {"vit": save_vit, "dit": save_dit}[name](tmp_path / name, **ROUTED)
    places = {"photos": write_idx(tmp_path / "photos", 100), "org/photos:test": write_idx(tmp_path / "few", 99)}
    opened = {place: open_images(str(path), model, labelled=True) for place, path in places.items()}

    def results(place, **how):
        """What the Hub finds in the card, as it is written, and the scores of the report."""
        monkeypatch.setattr("moh_llm.evaluation.images.open_images", lambda *_, **__: opened[place])
        given = tmp_path / "given" / "photos" if place == "photos" else place
        report = moh_llm.evaluate(model, data_dir=given, output_dir=tmp_path / "report", overwrite=True, **how)
        card = build_card(model, "org/moh", evaluation=tmp_path / "report", licence="mit")
        (tmp_path / "README.md").write_text(card)
        found = ModelCard.load(tmp_path / "README.md").data
        assert ("are not in the card's model-index" in card) == (not found.eval_results)
        assert not found.eval_results or found.model_name == "moh"
        return found.eval_results, report["models"]["model"]["scores"]

    (tmp_path / "given" / "photos").mkdir(parents=True)
    found, scores = results("photos")
    names = {"top-1 accuracy": "top1", "top-5 accuracy": "top5", "squared error to the noise": "error"}
    assert len(found) == {"vit": 2, "dit": 1}[name]
    for result in found:
        assert result.metric_value == scores[names[result.metric_name]]["value"]["value"]
        kind = {"vit": ("image-classification", "accuracy"), "dit": ("image-generation", "mse")}[name]
        assert (result.task_type, result.metric_type, result.verified) == (*kind, False)
        assert (result.dataset_type, result.dataset_name, result.dataset_split) == ("photos", "photos", None)
    assert not results("photos", limit=100)[0] and not results("org/photos:test")[0]
    opened["org/photos:test"] = opened["photos"]
    [first, *_] = results("org/photos:test")[0]
    assert (first.dataset_type, first.dataset_split) == ("org/photos", "test")


def test_a_card_without_records_says_so(tmp_path):
    sections = check_card(build_card(save_vit(tmp_path / "vit", **ROUTED), None))
    assert "How close the model is to its base is not on record" in sections["What it keeps"]
    assert "It has no image processor" in sections["How to load"] and "In this folder." in sections["How to load"]
    assert "No base is on record" in sections["How it was made"]


def test_models_on_the_hub_are_scored_and_teach(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no folder `org` is
    folders = {"org/moh": made("vit"), "org/base": made("vit-base")}
    commits = {name: tmp_path / name.replace("/", "-") / ("1" * 40) for name in folders}
    for name, place in commits.items():
        shutil.copytree(folders[name], place)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(commits[name]))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file, **_: str(commits[name] / file))
    how = {"data_dir": made("images"), "limit": 10}
    found = moh_llm.evaluate("org/moh", base="org/base", output_dir=tmp_path / "hub", **how)
    local = moh_llm.evaluate(made("vit"), base=made("vit-base"), output_dir=tmp_path / "local", **how)
    for label, name in (("model", "org/moh"), ("base", "org/base")):
        assert found["models"][label] == local["models"][label] | {"place": name}
    record = moh_llm.train(recipe(made("vit"), tmp_path / "run", made("images"), base="org/base", max_steps=1))
    assert record.status == "finished" and record.reference == "named"
