"""Images of a folder, an IDX file or a Hub dataset, as a model of images takes them.

images = open_images("photos", Path("vit-base"))  # photos/cat/1.jpg, photos/dog/7.png, ...
images.batch([0, 5])                              # [2, 3, 224, 224], float32
images.labels, images.class_names                 # tensor([0, 0, ..., 1]), ["cat", "dog"]
"""

import gzip
import importlib.util
import math
import mimetypes
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from moh_llm.errors import UserError, reason
from moh_llm.records.model import may_be_hub_id, read_config

_PLACES = "name a folder of images, an IDX file or a Hub dataset"
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation"}


@dataclass(frozen=True)
class ImageSet:
    """Images of a place, which are read when they are asked for: uint8 `[N, H, W]`, or rows of one PIL image each.

    `labels` has the class of each, int64 `[N]`, or is None. `processor` is the model's, which has so many `channels`
    and gives pixels of one `shape`, `(C, H, W)`; latents have none.
    """

    place: str
    images: Any
    labels: torch.Tensor | None
    class_names: list[str]
    processor: Any
    channels: int
    shape: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The images of these numbers, float32 `[B, C, H, W]`. Raises UserError for one that cannot be used."""
        if self.processor is None:  # latents
            return self.images[indices].float()
        return torch.stack([self._pixels(int(number)) for number in indices])

    def spread(self, count: int) -> list[int]:
        """The numbers of so many images or fewer, evenly spaced, since folders are in the order of classes."""
        count = min(count, len(self))
        return [number * len(self) // count for number in range(count)]

    def _pixels(self, number: int) -> torch.Tensor:
        from PIL import Image

        name, kind = f"image {number} of {self.place}", "L" if self.channels == 1 else "RGB"
        try:
            image = self.images[number]
            image = Image.fromarray(image.numpy()) if isinstance(image, torch.Tensor) else next(iter(image.values()))
            is_deep = image.mode in ("I", "F") or ";" in image.mode
            if is_deep or (self.channels == 1 and image.mode not in ("1", "L", "LA")):
                raise UserError(f"{name} has mode {image.mode}; convert it to {kind} of 8 bits, which the model takes")
            image = image.convert(kind)
            pixels = self.processor(image, return_tensors="pt")["pixel_values"][0].float()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise UserError(f"{name} cannot be read ({reason(error)}); replace it or take it out") from error
        if pixels.shape != self.shape != ():
            raise UserError(f"{name} becomes {[*pixels.shape]}, image 0 {[*self.shape]}: turn on do_center_crop")
        return pixels


def open_images(place: str, model: Path, labelled: bool = False, names: list[str] | None = None) -> ImageSet:
    """Open images for a model. Grey ones are repeated for models with three channels.

    Args:
        place: a folder, whose sub-folders, if any, are the classes; an IDX file (`*-images-idx3-ubyte`, also `.gz`),
            with its labels beside it; a Hub dataset, `OWNER/NAME` (its split `train`) or `OWNER/NAME:SPLIT`; or for a
            DiT on latents a safetensors file of `images` `[N, C, H, W]`, read as they are, and `labels` `[N]`.
        model: the model's folder. Where it has no image processor, images are cropped to its size and scaled to -1..1.
        labelled: whether the images must have the model's classes; a DiT's labels always must.
        names: the names of the model's classes; by default those in its config.

    Raises UserError for no image, one that is broken or has other channels, wrong or no classes, a missing package.
    """
    if missing := [name for name in ("PIL", "datasets") if importlib.util.find_spec(name) is None]:
        raise UserError(f"images need {missing[0]}, which is not installed: pip install 'moh-llm[vision]'")
    fields = read_config(model)
    if place.endswith(".safetensors"):
        return _open_latents(place, fields)
    processor, channels, size = _processor(model, fields)
    opened = _open_idx(Path(place)) if Path(place).is_file() else open_dataset(place)
    images = ImageSet(place, *opened, processor, channels)
    found = images.batch([0]).shape[1:]  # what does not fit is found here, rather than in the midst of the work
    images, own = replace(images, shape=found), [channels, size, size]
    if list(found) != own and ("dinov2" not in fields.get("model_type", "") or found[0] != channels):
        raise UserError(f"{model}: correct preprocessor_config.json: it makes images of {[*found]}, not {own}")
    if not labelled and (images.labels is None or "_class_name" not in fields):
        return images
    if images.labels is None or images.labels.min() < 0:  # of a test split that hides them
        raise UserError(f"{place} has no labels; make a sub-folder for each class, or put the file of labels beside it")
    own = fields.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # config.json leaves out what is the default
    names = names or [own.get(str(number), "") for number in range(fields.get("num_embeds_ada_norm", len(own)))]
    if (count := len(given := images.class_names)) != len(names):
        key = "num_embeds_ada_norm" if "_class_name" in fields else "num_labels"
        counts = f"{place} has {count} class{'es' * (count > 1)}, and {model} has {len(names)}"
        raise UserError(f"{counts}; set {key} in the file that moh-llm init reads, or name other images")
    is_numbered = all(map(str.isdecimal, given)) and list(map(int, given)) == list(range(count))
    is_imagenet = count == 1000 and all(re.fullmatch(r"n\d{8}", name) for name in given)  # whose models have this order
    if given == names or names[0] in ("LABEL_0", "") or is_numbered or is_imagenet:
        return images
    if sorted(names) != sorted(given) or len({*names}) < count:
        both = f"{place} has the classes {', '.join(given)[:100]}, and {model} has {', '.join(names)[:100]}"
        raise UserError(f"{both}; make the names equal (id2label in config.json), or number sub-folders from 0")
    order = torch.tensor([names.index(name) for name in given])  # the same classes in another order
    return replace(images, labels=order[images.labels], class_names=names)


def _open_latents(place: str, fields: dict[str, Any]) -> ImageSet:
    """The images and labels of a safetensors file."""
    try:
        tensors = load_file(place)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{place} cannot be read: {reason(error)}") from error
    images, labels = tensors.get("images", torch.empty(0)), tensors.get("labels")
    own = [fields.get("in_channels", 4), *2 * [fields.get("sample_size", 32)]]
    if not len(images) or list(images.shape[1:]) != own:
        raise UserError(f"{place} needs a tensor `images` [N, {', '.join(map(str, own))}], which the model takes")
    if not torch.stack(images.aminmax()).isfinite().all():
        raise UserError(f"{place} has values in `images` that are not finite; write it again without them")
    if labels is not None:
        classes, is_list = fields.get("num_embeds_ada_norm", 1000), labels.shape == images.shape[:1]
        if not is_list or labels.is_floating_point() or labels.min() < -1 or labels.max() >= classes:
            raise UserError(f"{place} needs a tensor `labels` [N] with a class of the model, or -1, for each image")
        labels = labels.long().where(labels >= 0, classes)  # the number that stands for no class
    return ImageSet(place, images, labels, [], None, own[0])


def _processor(model: Path, fields: dict[str, Any]) -> tuple[Any, int, int]:
    """The model's image processor, its channels and its size in pixels."""
    from transformers import AutoImageProcessor
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    defaults = (4, 32) if "_class_name" in fields else (3, 224)
    channels = fields.get("num_channels", fields.get("in_channels", defaults[0]))
    size = fields.get("image_size", fields.get("sample_size", defaults[1]))
    if pair := [key for key in ("image_size", "sample_size", "patch_size") if not isinstance(fields.get(key, 1), int)]:
        raise UserError(f"{model}: {pair[0]} is {fields[pair[0]]}; write one number in config.json, for squares")
    if channels not in (1, 3):
        raise UserError(f"{model} takes {channels} channels, images have 1 or 3; latents are read from .safetensors")
    try:
        if (model / "preprocessor_config.json").is_file():
            processor = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
        else:
            scale = {"image_mean": [0.5] * channels, "image_std": [0.5] * channels, "do_convert_rgb": channels == 3}
            processor = BitImageProcessorPil(size={"shortest_edge": size}, crop_size=size, **scale)
    except Exception as error:  # whatever a file by others makes transformers raise
        raise UserError(f"{model}: preprocessor_config.json makes no image processor ({reason(error)[:99]})") from error
    return processor, channels, size


def open_dataset(place: str) -> tuple[Any, torch.Tensor | None, list[str]]:
    """Rows of one image of a folder or Hub dataset, labels, and names of classes. Raises UserError where none are."""
    import datasets

    name, _, split = place.partition(":")
    if Path(place).is_dir():
        files, labels, names = _list_folder(Path(place))
        features = datasets.Features({"image": datasets.Image()})
        return datasets.Dataset.from_dict({"image": [str(file.absolute()) for file in files]}, features), labels, names
    if not may_be_hub_id(name):
        raise UserError(f"{place} does not exist; {_PLACES}")
    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # of datasets, huggingface_hub, fsspec or pyarrow
        raise UserError(f"{place} gives no images ({reason(error)[:300]}); {_PLACES}") from error
    column = {type(feature): name for name, feature in reversed(rows.features.items())}
    if datasets.Image not in column or not len(rows):
        raise UserError(f"{place} has no images, but the columns {', '.join(rows.features)}; {_PLACES}")
    classes = column.get(datasets.ClassLabel)
    labels, names = (torch.tensor(rows[classes][:]), rows.features[classes].names) if classes else (None, [])
    return rows.select_columns(column[datasets.Image]), labels, names


def _list_folder(folder: Path) -> tuple[list[Path], torch.Tensor | None, list[str]]:
    """The images of a folder by class, their labels, and the names of the classes: the sub-folders that hold images.

    datasets' `imagefolder` would take words in names, such as "test", for splits, and drop what `metadata.csv` omits.
    """
    from PIL import Image

    Image.init()
    opened = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    files, unread = list[Path](), list[OSError]()
    for place, folders, found in os.walk(folder, onerror=unread.append, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in found if not name.startswith(".")):
            if path.suffix.lower() in opened:
                files.append(path)
            elif (mimetypes.guess_type(path.name)[0] or "").startswith("image/"):
                raise UserError(f"{path} has a format that Pillow does not open; convert it or take it out")
    of = {path: path.relative_to(folder).parts[0] for path in files if path.parent != folder}
    is_numbered = all(map(str.isdecimal, of.values()))
    names = sorted({*of.values()}, key=lambda name: (int(name) if is_numbered else 0, name))
    if unread or not files:
        raise UserError(f"{folder} gives no images ({' '.join(map(reason, unread)) or 'it holds none'}); {_PLACES}")
    if (splits := {name.lower() for name in names} & _SPLITS) and (len(splits) > 1 or len(names) == 1):
        raise UserError(f"{folder} holds splits; name one of them: {' or '.join(str(folder / name) for name in names)}")
    if names and (beside := [path for path in files if path not in of]):
        raise UserError(f"{beside[0]} lies beside sub-folders of images; move it into that of its class")
    number = {name: label for label, name in enumerate(names)}
    files.sort(key=lambda path: (number.get(of.get(path, ""), 0), path))
    return files, torch.tensor([number[of[path]] for path in files]) if names else None, names


def _open_idx(path: Path) -> tuple[torch.Tensor, torch.Tensor | None, list[str]]:
    """The images of an IDX file, the labels in the file beside it, and the names of the classes."""
    images, beside = _read_idx(path, 3), path.with_name(path.name.replace("images-idx3", "labels-idx1"))
    if beside == path or not beside.is_file():
        return images, None, []
    if len(labels := _read_idx(beside, 1).long()) != len(images):
        raise UserError(f"{beside} has {len(labels)} labels for {len(images)} images; download both again")
    return images, labels, [str(number) for number in range(1 + int(labels.max()))]


def _read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """The bytes `[N, ...]` of an IDX file. Raises UserError unless it is whole and has that many dimensions."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dimensions)
            shape = [int.from_bytes(head[at : at + 4], "big") for at in range(4, len(head), 4)]
            is_idx = head[:4] == bytes([0, 0, 8, dimensions])
            body = file.read(math.prod(shape) + 1) if is_idx else b""
    except (OSError, EOFError, OverflowError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    if not body or len(body) != math.prod(shape):
        raise UserError(f"{path} is no IDX file of bytes with {dimensions} dimensions, or it is cut; {_PLACES}")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(shape)
