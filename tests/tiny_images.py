"""Tiny images, models and recipes for the tests of training and scoring."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from moh_llm.training.config import TrainConfig
from moh_llm.vision import MoHViTConfig
from moh_llm.vision.modeling_moh_vit import MoHViTForImageClassification

SIZE = 8  # pixels a side
ROUTED = {"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear", "head_fallback": "value"}


def write_idx(folder: Path, count: int, seed: int = 0) -> Path:
    """Grey images of 3 classes, which differ in the row that is bright, as IDX files; the path of the images."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 3, count).astype(np.uint8)
    images = draw.integers(0, 120, (count, SIZE, SIZE)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 * label] = 250
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
        header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
        (folder / name).write_bytes(header + values.tobytes())
    return folder / "images-idx3-ubyte"


def save_vit(folder: Path, **plan: Any) -> Path:
    """A MoH-ViT of 2 layers for those images."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = MoHViTConfig(**size, num_labels=3, image_size=SIZE, patch_size=4, num_channels=1, **(plan or ROUTED))
    model = MoHViTForImageClassification(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.2)
    model.save_pretrained(folder)
    return folder


def save_dit(folder: Path, **plan: Any) -> Path:
    """A MoH-DiT of 2 layers for those images, or with an empty plan a DiT."""
    import diffusers

    from moh_llm.vision import MoHDiTTransformer2DModel

    torch.manual_seed(0)
    size = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "num_embeds_ada_norm": 3}
    kind = MoHDiTTransformer2DModel if plan else diffusers.DiTTransformer2DModel
    out = {"out_channels": plan.pop("out_channels", 1)}
    kind(**size, sample_size=SIZE, patch_size=4, in_channels=1, **out, **plan).save_pretrained(folder)
    return folder


def recipe(model: Path, output: Path, images: Path, **changes: Any) -> TrainConfig:
    """Four steps of four images, with a checkpoint after each; dotted names in `changes` have `__`."""
    from moh_llm.recipe import read_options

    values = {"model": str(model), "output_dir": str(output), "max_steps": 4, "report_to": ()}
    values |= {"data.batch_size": 4, "data.micro_batch_size": 2, "mixed_precision": "no", "schedule.warmup_steps": 1}
    values |= {"images.train": str(images), "checkpoint.save_steps": 1, "checkpoint.save_total_limit": 9}
    values |= {"optimizer.learning_rate": 1e-2, "optimizer.router_learning_rate": 1e-2, "evaluation.eval_steps": 2}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return read_options(TrainConfig, [("test", *item) for item in values.items()])


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's folder, or of a checkpoint."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found
