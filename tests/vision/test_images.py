"""Images of folders, IDX files and datasets, and bad ones."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moh_llm.errors import UserError
from moh_llm.vision.images import open_images


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(head + array.tobytes())


@pytest.fixture
def model(tmp_path):
    """A folder with the `config.json` of a model that takes 8x8 pixels of 3 channels in 2 classes, or as is said."""

    def make(**fields) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        default = {"model_type": "vit", "image_size": 8, "num_channels": 3}
        (folder / "config.json").write_text(json.dumps(default | fields))
        return folder

    return make


@pytest.fixture
def photos(tmp_path) -> Path:
    """Three images of two classes: grey, coloured with a transparent part, and of two colours."""
    folder = tmp_path / "photos"
    for name, mode, value in [("cat/1.png", "L", 255), ("cat/2.png", "RGBA", (0, 255, 0, 9)), ("dog/1.png", "1", 0)]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (10, 16), value).save(folder / name)
    return folder


def test_a_folder_gives_pixels_and_classes(photos, model):
    images = open_images(str(photos), model(), labelled=True)
    assert len(images) == 3 and images.labels.tolist() == [0, 0, 1] and images.class_names == ["cat", "dog"]
    pixels = images.batch([0, 1, 2])
    assert pixels.shape == (3, 3, 8, 8) and pixels.dtype == torch.float32
    colours = torch.tensor([[1.0, 1, 1], [-1, 1, -1], [-1, -1, -1]])
    torch.testing.assert_close(pixels.mean((2, 3)), colours)
    # The same classes, which the model numbers in another order.
    images = open_images(str(photos), model(id2label={"0": "dog", "1": "cat"}), labelled=True)
    assert images.labels.tolist() == [1, 1, 0] and images.class_names == ["dog", "cat"]
    images = open_images(str(photos / "cat"), model())
    assert len(images) == 2 and images.labels is None


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_an_idx_file_gives_pixels_and_the_labels_beside_it(ending, model, tmp_path):
    pixels = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8)
    write_idx(tmp_path / f"a-images-idx3-ubyte{ending}", pixels)
    write_idx(tmp_path / f"a-labels-idx1-ubyte{ending}", np.array([1, 0], dtype=np.uint8))
    dit = {"_class_name": "DiTTransformer2DModel", "in_channels": 1, "sample_size": 8, "num_embeds_ada_norm": 2}
    images = open_images(str(tmp_path / f"a-images-idx3-ubyte{ending}"), model(**dit))
    assert images.labels.tolist() == [1, 0] and images.class_names == ["0", "1"]
    torch.testing.assert_close(images.batch(torch.tensor([1]))[0, 0], torch.tensor(pixels[1]) / 127.5 - 1)


def test_a_model_has_its_own_image_processor(photos, model):
    folder = model()
    crop = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 8}, "crop_size": 8}
    crop |= {"image_mean": [0, 0, 0], "image_std": [2, 2, 2]}
    (folder / "preprocessor_config.json").write_text(json.dumps(crop))
    torch.testing.assert_close(open_images(str(photos), folder).batch([0]), torch.full((1, 3, 8, 8), 0.5))
    (folder / "preprocessor_config.json").write_text(json.dumps(crop | {"crop_size": 6}))
    with pytest.raises(UserError, match=r"makes images of \[6, 6\], and the model takes 8"):
        open_images(str(photos), folder)
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match=r"preprocessor_config.json makes no image processor \("):
        open_images(str(photos), folder)


def test_bad_images_are_refused(photos, model, tmp_path):
    def refusal(place, folder=None, labelled=False) -> str:
        with pytest.raises(UserError) as caught:
            images = open_images(str(place), folder or model(), labelled)
            images.batch(range(len(images)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (photos / "dog" / "2.png").write_bytes((photos / "cat" / "2.png").read_bytes()[:50])
    assert "image 3 of" in (text := refusal(photos)) and "cannot be read" in text
    (photos / "dog" / "2.png").unlink()
    assert "mode RGBA; the model takes 8 bits in 1 channels" in refusal(photos, model(num_channels=1))
    assert "takes 4 channels, images have 1 or 3" in refusal(photos, model(num_channels=4))
    three = refusal(photos, model(id2label={"0": "a", "1": "b", "2": "c"}), True)
    assert "has 2 classes, and" in three and "has 3; set num_labels in the file that moh-llm init reads" in three
    assert "has no labels; make a sub-folder" in refusal(photos / "cat", model(), True)
    (tmp_path / "empty").mkdir()
    assert "gives no images" in refusal(tmp_path / "empty")
    assert "does not exist; name a folder of images" in refusal(tmp_path / "nowhere")
    idx, labels = tmp_path / "a-images-idx3-ubyte", tmp_path / "a-labels-idx1-ubyte"
    write_idx(idx, np.zeros((3, 8, 8), dtype=np.uint8))
    write_idx(labels, np.zeros(2, dtype=np.uint8))
    assert "has 2 labels for 3 images" in refusal(idx)
    idx.write_bytes(idx.read_bytes()[:-1])
    assert "is no IDX file of bytes with 3 dimensions, or it is cut" in refusal(idx)
    (broken := tmp_path / "b.gz").write_bytes(gzip.compress(bytes(99))[:-20])
    assert "b.gz" in refusal(broken)


def test_a_missing_package_is_named(photos, model, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    with pytest.raises(UserError, match=r"images need datasets, .*: pip install 'moh-llm\[vision\]'"):
        open_images(str(photos), model())


def test_a_hub_dataset_is_read_by_its_features(photos, model, monkeypatch):
    import datasets

    asked = []
    rows = datasets.load_dataset("imagefolder", data_dir=str(photos), split="train").rename_column("image", "photo")
    monkeypatch.setattr(datasets, "load_dataset", lambda path, split: asked.append((path, split)) or rows)
    images = open_images("owner/pets:test", model(), labelled=True)
    assert asked == [("owner/pets", "test")] and images.labels.tolist() == [0, 0, 1] and len(images.batch([2])) == 1
    monkeypatch.setattr(datasets, "load_dataset", lambda path, split: rows.remove_columns("photo"))
    with pytest.raises(UserError, match="owner/pets has no images, but the columns label"):
        open_images("owner/pets", model())
    assert "torchvision" not in sys.modules
