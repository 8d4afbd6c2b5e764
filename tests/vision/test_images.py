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
from safetensors.torch import save_file

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


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "blue").save(path, "png")


@pytest.mark.parametrize(
    ("names", "classes", "labels"),
    [
        (["cat/street_train_1.png", "cat/2.png", "dog/my_test.png", "dog/4.PNG"], ["cat", "dog"], [0, 0, 1, 1]),
        (["bus/1.png", "train_car/2.png"], ["bus", "train_car"], [0, 1]),
        (["dog/ILSVRC2012_val_00000001.JPEG", "val/2.png", "val/deep/3.png"], ["dog", "val"], [0, 1, 1]),
        (["9/1.png", "10/1.png", "9/deep/x.png"], ["9", "10"], [0, 0, 1]),
        (["test_1.png", "2.png", ".hidden/3.png", "._2.png"], [], None),
        (["train_only/test.png"], ["train_only"], [0]),
    ],
)
def test_every_image_of_a_folder_has_the_class_of_its_sub_folder(names, classes, labels, model, tmp_path):
    for name in names:
        photo(tmp_path / "test" / name)
    (tmp_path / "test" / "metadata.csv").write_text(f"file_name,caption\n{names[0]},a\n")
    images = open_images(str(tmp_path / "test"), model())
    assert images.class_names == classes and (labels is None or images.labels.tolist() == labels)
    assert (
        len(images)
        == len([name for name in names if not name.startswith(".")])
        == len(images.batch(range(len(images))))
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["train/cat/1.png", "test/cat/1.png"], "holds splits; name one of them: PLACE/test or PLACE/train"),
        (["Val/1.png"], "holds splits; name one of them: PLACE/Val"),
        (["cat/1.png", "2.png"], "PLACE/2.png lies beside sub-folders of images; move it"),
        (["cat/1.png", "cat/2.heic"], "PLACE/cat/2.heic has a format that Pillow does not open; convert it"),
        (["cat/1.png"], "has 1 class, and"),
        (["bird/1.png", "dog/2.png"], r"has the classes bird, dog, and .* has dog, cat; make the names equal"),
        (["1/1.png", "2/2.png"], "has the classes 1, 2, and"),
    ],
)
def test_folders_that_leave_a_doubt_are_refused(names, told, model, tmp_path):
    for name in names:
        photo(tmp_path / name)
    with pytest.raises(UserError, match=told.replace("PLACE", str(tmp_path))):
        open_images(str(tmp_path), model(id2label={"0": "dog", "1": "cat"}), labelled=True)


def test_numbers_are_labels_and_names_that_a_model_has_twice_are_refused(model, tmp_path):
    for number in range(11):
        photo(tmp_path / "photos" / str(number) / "1.png")
    named = {str(number): f"thing{number}" for number in range(11)}
    assert open_images(str(tmp_path / "photos"), model(id2label=named), True).labels.tolist() == list(range(11))
    (tmp_path / "photos" / "10").rename(tmp_path / "photos" / "ten")
    twice = {str(number): name for number, name in enumerate(["ten", *map(str, range(9)), "0"])}
    with pytest.raises(UserError, match="make the names equal"):
        open_images(str(tmp_path / "photos"), model(id2label=twice), True)


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
    with pytest.raises(UserError, match=r"makes images of \[3, 6, 6\], not \[3, 8, 8\]"):
        open_images(str(photos), folder)
    one = model(num_channels=1)  # which the processor gives three
    (folder / "preprocessor_config.json").write_text(json.dumps(crop))
    with pytest.raises(UserError, match=r"makes images of \[3, 8, 8\], not \[1, 8, 8\]"):
        open_images(str(photos / "cat"), one)
    photo(photos / "dog" / "2.png")  # a square, and the others are not
    (folder / "preprocessor_config.json").write_text(json.dumps(crop | {"do_center_crop": False}))
    images = open_images(str(photos), model(model_type="dinov2"))
    with pytest.raises(UserError, match=r"image 3 of .* \[3, 8, 8\], image 0 \[3, 12, 8\]: turn on do_center_crop"):
        images.batch([0, 3])
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
    assert "image 3 of" in (text := refusal(photos)) and "cannot be read" in text and "replace it" in text
    (photos / "dog" / "2.png").unlink()
    assert "mode RGBA; convert it to L of 8 bits" in refusal(photos, model(num_channels=1))
    assert "image_size is [8, 8]; write one number" in refusal(photos, model(image_size=[8, 8]))
    assert "patch_size is [4, 4]; write one number" in refusal(photos, model(patch_size=[4, 4]))
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


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"labels": torch.tensor([0.0, 1.0])}, r"needs a tensor `labels` \[N\] with a class of the model, or -1"),
        ({"labels": torch.tensor([[0], [1]])}, "needs a tensor `labels`"),
        ({"labels": torch.tensor([0, -2])}, "needs a tensor `labels`"),
        ({"labels": torch.tensor([0, 2])}, "needs a tensor `labels`"),
        ({"labels": torch.tensor([0])}, "needs a tensor `labels`"),
        ({"images": torch.full((2, 4, 8, 8), torch.nan)}, "values in `images` that are not finite"),
        ({"images": torch.full((2, 4, 8, 8), -torch.inf).half()}, "values in `images` that are not finite"),
        ({"images": torch.zeros(2, 4, 8, 9)}, r"needs a tensor `images` \[N, 4, 8, 8\]"),
        ({"labels": torch.tensor([1, -1], dtype=torch.int32)}, None),
    ],
)
def test_latents_without_a_class_have_the_number_that_stands_for_none(bad, told, model, tmp_path):
    dit = {"_class_name": "DiTTransformer2DModel", "in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 2}
    file = str(tmp_path / "latents.safetensors")
    save_file({"images": torch.zeros(2, 4, 8, 8)} | bad, file)
    if told is None:
        assert open_images(file, model(**dit)).labels.tolist() == [1, 2]
        return
    with pytest.raises(UserError, match=told):
        open_images(file, model(**dit))


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
