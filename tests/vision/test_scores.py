"""Scores of models of images: accuracy and errors as loops, pairs with the base, and samples."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import ROUTED, SIZE, save_dit, save_vit, write_idx

import moh_llm
from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.evaluation.images import paired, score_images
from moh_llm.vision import load_model
from moh_llm.vision.images import open_images
from moh_llm.vision.modeling_moh_vit import MoHViTForImageClassification, MoHViTModel
from moh_llm.vision.prediction import add_noise


def test_classifiers_are_compared_on_the_same_images(tmp_path, capsys) -> None:
    images = write_idx(tmp_path / "images", 20)
    model, base = save_vit(tmp_path / "moh"), save_vit(tmp_path / "base", **ROUTED | {"num_active_heads": 4})
    command = [
        "evaluate",
        str(model),
        "--base",
        str(base),
        "--data-dir",
        str(images),
        "--output-dir",
        str(tmp_path / "r"),
    ]
    assert main([*command, "--limit", "10", "--batch-size", "3"]) == 0
    record = json.loads((tmp_path / "r/report.json").read_text())
    opened, hits = open_images(str(images), model), {}
    for label, folder in (("model", model), ("base", base)):
        network = load_model(folder)
        with torch.no_grad():
            best = [network(opened.batch([number])).logits[0].argmax().item() for number in range(0, 20, 2)]
        hits[label] = [int(one == opened.labels[2 * number]) for number, one in enumerate(best)]
        found = record["models"][label]
        assert found["count"] == 10 and found["scores"]["top1"]["value"]["value"] == sum(hits[label]) / 10
        assert found["scores"]["top5"]["value"]["value"] == 1  # of three classes
    difference = record["models"]["model"]["scores"]["top1"]["difference"]
    assert difference["value"] == pytest.approx((sum(hits["model"]) - sum(hits["base"])) / 10)
    assert difference["interval"][0] <= difference["value"] <= difference["interval"][1]
    said = capsys.readouterr().out.splitlines()[-3:]  # others are of DeepSpeed
    assert said[0].startswith("base: top1 value ") and "top1 ratio " in said[1]


def test_models_without_classes_are_compared_by_their_class_token(tmp_path) -> None:
    images, folders = write_idx(tmp_path / "images", 6), {}
    for name, active in (("base", 4), ("moh", 2)):
        config = load_model(save_vit(tmp_path / "vit", **ROUTED | {"num_active_heads": active})).config
        torch.manual_seed(0)
        MoHViTModel(config).save_pretrained(tmp_path / name)
        folders[name] = load_model(tmp_path / name)
    record = moh_llm.evaluate(tmp_path / "moh", base=tmp_path / "base", data_dir=images, output_dir=tmp_path / "r")
    pixels = open_images(str(images), tmp_path / "moh").batch(range(6))
    with torch.no_grad():
        own, base = (folders[name](pixels).last_hidden_state[:, 0] for name in ("moh", "base"))
    expected = torch.cosine_similarity(own, base).mean().item()
    assert record["models"]["model"]["scores"]["cosine"]["value"]["value"] == pytest.approx(expected, abs=1e-6)
    assert expected < 1 - 1e-5 and record["models"]["base"]["scores"]["cosine"]["value"]["value"] == pytest.approx(1)


def test_errors_of_denoisers_are_loops_with_the_same_noise(tmp_path) -> None:
    pytest.importorskip("diffusers")
    images = write_idx(tmp_path / "images", 4)
    network = load_model(save_dit(tmp_path / "dit", out_channels=2, **ROUTED | {"head_fallback": "none"}))
    opened = open_images(str(images), tmp_path / "dit")
    found = score_images(network, opened, [3, 1], size=1)
    for row, number in enumerate([3, 1]):
        draw, pixels = torch.Generator().manual_seed(row), opened.batch([number])
        for band in range(5):
            step = torch.randint(200 * band, 200 * band + 200, (1,), generator=draw)
            noise = torch.randn(1, 1, SIZE, SIZE, generator=draw)
            with torch.no_grad():
                output = network(add_noise(pixels, noise, step), step, opened.labels[[number]]).sample[0, 0]
            error = ((output - noise[0, 0]).double() ** 2).mean().item()
            assert found[f"error_{200 * band}_{200 * band + 199}"][row] == pytest.approx(error, rel=1e-4)
    whole = score_images(network, opened, [3, 1], size=2)
    assert all(np.allclose(found[name], whole[name], rtol=1e-4) for name in found)
    assert np.allclose(found["error"], np.mean([values for name, values in found.items() if name != "error"], 0))
    torch.nn.init.constant_(network.proj_out_2.bias, torch.nan)
    with pytest.raises(UserError, match=r"values that are not finite$"):
        score_images(network, opened, [3, 1], size=2)


def test_samples_are_drawn_and_written(tmp_path, monkeypatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setattr("moh_llm.evaluation.images.SAMPLING_STEPS", 4)
    images = write_idx(tmp_path / "images", 40)
    model = save_dit(tmp_path / "dit", out_channels=2, **ROUTED | {"head_fallback": "none"})
    words = [
        "evaluate",
        str(model),
        "--base",
        str(model),
        "--data-dir",
        str(images),
        "--output-dir",
        str(tmp_path / "r"),
    ]
    assert main([*words, "--samples", "10"]) == 0
    record = json.loads((tmp_path / "r/report.json").read_text())
    own, base = (np.load(tmp_path / "r" / f"{label}.npz")["arr_0"] for label in ("model", "base"))
    assert own.shape == (10, SIZE, SIZE, 3) and own.dtype == np.uint8 and len(np.unique(own)) > 50
    assert np.array_equal(own, base)  # the same model and noise
    grid = np.asarray(Image.open(tmp_path / "r/model.png"))
    assert grid.shape == (3 * SIZE, 3 * SIZE, 3) and np.array_equal(grid[SIZE : 2 * SIZE, :SIZE], own[3])
    scores = record["models"]["model"]
    assert scores["scores"]["error"]["ratio"] == {"value": 1, "interval": [1, 1]}


def test_paired_figures_are_means_and_their_intervals_cover_noise() -> None:
    base = np.linspace(0.5, 1.5, 200)
    found = paired(1.02 * base, base)
    assert found["value"]["value"] == pytest.approx(1.02) and found["ratio"]["value"] == pytest.approx(1.02)
    assert np.diff(found["ratio"]["interval"]) < 1e-9 < np.diff(found["value"]["interval"])
    assert "ratio" not in paired(base, 0 * base)
    for right in (0, 1, 9, 10):  # of 10 images
        own, base = (np.arange(10.0) < right).astype(float), (np.arange(10.0) < 5).astype(float)
        found = paired(own, base, is_share=True)
        (low, high), change = found["value"]["interval"], found["difference"]["interval"]
        assert 0 <= low <= right / 10 <= high <= 1 and high - low > 0.2 and change[0] <= right / 10 - 0.5 <= change[1]
        assert found["ratio"]["interval"] is None or found["ratio"]["interval"][0] >= 0


IMAGES, SAMPLES = "--data-dir IMAGES", "--data-dir IMAGES --samples"


@pytest.mark.parametrize(
    ("model", "words", "told"),
    [
        ("vit", "", "models of images are scored on images: name them as data_dir"),
        ("vit", f"{IMAGES} --suite smoke", "suite has no meaning for models of images"),
        ("vit", f"{IMAGES} --base DIT", "is another kind of model (classifier) than DIT (DiT on 1 x 8 x 8)"),
        ("dit", f"{IMAGES} --base FOUR", "is another kind of model (DiT on 1 x 8 x 8) than FOUR (DiT on 4 x 8 x 8)"),
        ("narrow", f"{IMAGES} --base WIDE", "is another kind of model (no classes, width 32) than WIDE (no classes, w"),
        ("vit", f"{SAMPLES} 4", "samples are drawn by DiTs on pixels, and VIT is none (classifier)"),
        ("four", f"{SAMPLES} 4", "samples are drawn by DiTs on pixels, and FOUR is none (DiT on 4 x 8 x 8)"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_before_anything_is_scored(
    model, words, told, tmp_path, capsys, monkeypatch
) -> None:
    def make(name: str) -> str:
        if name == "images":
            return str(write_idx(tmp_path / name, 6))
        if name in ("dit", "four"):
            diffusers = pytest.importorskip("diffusers")
            config = load_model(save_dit(tmp_path / "dit")).config | {"in_channels": 4 if name == "four" else 1}
            diffusers.DiTTransformer2DModel.from_config(config).save_pretrained(tmp_path / name)
        else:
            config = load_model(save_vit(tmp_path / "vit")).config
            config.hidden_size = 64 if name == "wide" else 32
            (MoHViTForImageClassification if name == "vit" else MoHViTModel)(config).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    monkeypatch.setattr("moh_llm.evaluation.images.score_images", None)
    names = {word: make(word.lower()) for word in (model.upper(), *words.split()) if word.isupper()}
    command = ["evaluate", names[model.upper()], "--output-dir", str(tmp_path / "report")]
    capsys.readouterr()
    assert main([*command, *(names.get(word, word) for word in words.split())]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    for name, place in names.items():
        said = said.replace(place, name)
    assert told in said and not (tmp_path / "report").exists()
