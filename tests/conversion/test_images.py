"""Conversion of ViT, DeiT, DINOv2 and DiT: the base inside, the costs of images, and what is refused."""

import gzip
import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

import moh_llm
from moh_llm.conversion.images import _attention, _batches, _samples
from moh_llm.errors import UserError
from moh_llm.vision import load_model
from moh_llm.vision.images import open_images
from moh_llm.vision.prediction import predict

FAMILIES = ("ViT", "DeiT", "Dinov2", "DiT")
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 3}
SIZE |= {"image_size": 8, "patch_size": 4, "num_channels": 1}


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """An IDX file of 48 grey images of 3 classes; those of a class are alike."""
    folder, drawn = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    labels = np.arange(48, dtype=np.uint8) % 3
    pixels = drawn.integers(0, 256, (3, 8, 8))[labels] * 0.7 + drawn.integers(0, 76, (48, 8, 8))
    write_idx(folder / "t-images-idx3-ubyte.gz", pixels.astype(np.uint8))
    write_idx(folder / "t-labels-idx1-ubyte.gz", labels)
    return folder / "t-images-idx3-ubyte.gz"


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    @cache
    def make(family: str) -> Path:
        torch.manual_seed(0)
        if family == "DiT":
            size = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
            size |= {"in_channels": 1, "out_channels": 1, "num_embeds_ada_norm": 3}
            model = pytest.importorskip("diffusers").DiTTransformer2DModel(**size)
        else:
            kind, more = ("Model", {}) if family == "Dinov2" else ("ForImageClassification", {"intermediate_size": 48})
            config = getattr(transformers, f"{family}Config")(**SIZE, **more)
            model = getattr(transformers, f"{family}{kind}")(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn(weight.shape) * 0.3)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        (folder / "LICENSE").write_text("terms of the base")
        if family != "DiT":  # as old models have it, without the name of a class
            old = {"size": 8, "crop_size": 8, "image_mean": [0.5], "image_std": [0.5], "do_convert_rgb": False}
            (folder / "preprocessor_config.json").write_text(json.dumps(old))
        return folder

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_is_inside_bit_for_bit(family, base_of, images, tmp_path, monkeypatch):
    base, moh, back = base_of(family), tmp_path / "moh", tmp_path / "back"
    record = moh_llm.convert(base, moh, calibration=images, num_active_heads=2)
    dense, converted = load_model(base), load_model(moh)
    assert sum(router.num_active for router in converted.routers) == 4 and record.images.equals_base
    opened = open_images(str(images), moh)
    for inputs in _batches(dense, opened, torch.arange(20)):
        with torch.no_grad():
            expected = predict(dense, inputs)[0]
            assert not torch.equal(predict(converted, inputs)[0], expected)
            with converted.all_heads_active():
                assert torch.equal(predict(converted, inputs)[0], expected)
    [code] = re.findall(r"```python\n(.*?)```", (moh / "README.md").read_text(), re.DOTALL)
    Image.new("RGB", (9, 20), "blue").save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    exec(code.replace('"."', repr(str(moh))), said := {})
    assert type(said["model"]).__name__ == type(converted).__name__
    moh_llm.to_dense(moh, back)
    for path in base.iterdir():
        if path.name == "config.json":
            assert json.loads((back / path.name).read_text()) == json.loads(path.read_text())
        else:
            assert (back / path.name).read_bytes() == path.read_bytes(), path.name
    assert [path.name for path in back.iterdir() if not (base / path.name).exists()] == ["seal.json"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_tells_how_an_error_changes_a_prediction(family, base_of, images):
    """<g, e> is the change of -log p(y) when a layer's output changes by e, by a difference quotient."""
    base = base_of(family)
    model, opened = load_model(base).requires_grad_(False), open_images(str(images), base)
    numbers, step = torch.arange(16), 1e-2
    samples = _samples(model, opened, numbers)
    inputs = next(_batches(model, opened, numbers))
    generator = torch.Generator().manual_seed(0)
    output = predict(model, inputs)[0]
    if output.dim() == 2:
        drawn = output.softmax(-1).multinomial(1, generator=generator)
    else:
        drawn = output - torch.randn(output.shape, generator=generator)

    def information(output: torch.Tensor) -> torch.Tensor:
        if output.dim() == 2:
            return -output.log_softmax(-1).gather(1, drawn)[:, 0]
        return (output - drawn).square().flatten(1).sum(1) / 2

    for layer, sample in zip(_attention(model).values(), samples, strict=True):
        tokens, width = sample.together, sample.inputs.shape[1]
        assert sample.fitted == 12 * tokens and sample.gradients.shape == (4 * tokens, width)
        error = torch.randn(16, tokens, width, generator=torch.Generator().manual_seed(1))
        changed = []
        for sign in (-step, step):
            out = getattr(layer, "o_proj", None) or layer.to_out[0]
            moved = sign * error
            handle = out.register_forward_hook(lambda module, args, output, moved=moved: output + moved)
            changed.append(information(predict(model, inputs)[0]))
            handle.remove()
        expected = ((changed[1] - changed[0]) / (2 * step))[3::4]  # of the images that are held out
        found = (sample.gradients.unflatten(0, (4, tokens)) * error[3::4]).sum((1, 2))
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))


def test_a_dit_on_latents_is_converted(tmp_path):
    torch.manual_seed(0)
    size = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 4, "out_channels": 8}
    model = pytest.importorskip("diffusers").DiTTransformer2DModel(**size, num_embeds_ada_norm=3)
    model.save_pretrained(tmp_path / "base")
    latents = {"images": torch.randn(40, 4, 4, 4), "labels": torch.arange(40) % 3}
    save_file(latents, tmp_path / "latents.safetensors")
    record = moh_llm.convert(tmp_path / "base", tmp_path / "moh", calibration=tmp_path / "latents.safetensors")
    assert record.images.equals_base and len(record.images.by_timestep) == 4
    assert record.calibration.tokens == 32 * 4  # patches of 4/5 of the images


def test_router_none_and_the_papers_preset_convert_also_a_converted_model(base_of, images, tmp_path, capsys):
    base = base_of("ViT")
    for name, options in {"fixed": {"router": "none"}, "paper": {"preset": "paper"}}.items():
        record = moh_llm.convert(base, tmp_path / name, calibration=images, num_active_heads=3, **options)
        base = tmp_path / name
        fields = json.loads((tmp_path / name / "config.json").read_text())
        assert record.images.equals_base and record.images.kl > 0
        expected = ("none", "value") if name == "fixed" else ("query_norm", "none")
        assert (fields["router_type"], fields["head_fallback"]) == expected
    moh_llm.to_dense(base, tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (base_of("ViT") / "model.safetensors").read_bytes()
    assert "its records" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "DiT", "calibration_tokens": 31 * 16}, "leave 31 images to fit on, and 32 are needed"),
        ({"keys": 0.5}, "is a model of images; drop keys, which is for text"),
        ({"fallback": "local", "context": 64}, "drop context, fallback local, which"),
        ({"calibration": None}, "name one place of images with --calibration"),
        ({"num_active_heads": 5}, "num_active_heads=5 must lie between 1 and num_attention_heads=4"),
        ({"calibration_tokens": 16}, "leave 4 images to fit on, and 16 are needed"),
    ],
)
def test_what_images_cannot_have_is_refused_and_nothing_is_written(options, message, base_of, images, tmp_path):
    with pytest.raises(UserError, match=message):
        base = base_of(options.get("base", "ViT"))
        moh_llm.convert(**{"output_dir": tmp_path / "moh", "calibration": images} | options | {"base": base})
    assert not list(tmp_path.iterdir())


def test_a_broken_folder_is_refused(base_of, images, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(base_of("ViT"), folder)
    fields = json.loads((folder / "config.json").read_text())
    for changed, message in [
        ({"architectures": ["ViTForMaskedImageModeling"]}, "holds a ViTForMaskedImageModeling, and no ViT"),
        ({"num_hidden_layers": 3}, "base lacks vit.*; download or convert it again"),
        ({"hidden_size": 36}, "makes no ViTForImageClassification"),
        ({"quantization_config": {"bits": 4}}, "has a quantization_config: there is no dense model"),
    ]:
        (folder / "config.json").write_text(json.dumps(fields | changed))
        with pytest.raises(UserError, match=message):
            moh_llm.convert(folder, tmp_path / "moh", calibration=images, num_active_heads=2)
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="base is no MoH model"):
        moh_llm.to_dense(folder, tmp_path / "back")
