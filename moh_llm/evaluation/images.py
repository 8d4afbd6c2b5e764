"""Scores of models of images, paired with their base's: accuracy of classifiers, error of DiTs, and their samples.

Shapes: B images, N samples, C channels, H x W pixels, F features.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moh_llm.conversion.base import locate
from moh_llm.devices import choose_device
from moh_llm.errors import UserError
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.models import label_models
from moh_llm.evaluation.statistics import mean_interval, ratio_interval
from moh_llm.files import check_output_folder, new_folder, write_json
from moh_llm.intervals import interval, show_figure, within
from moh_llm.locking import lock_folder
from moh_llm.reading import read_json
from moh_llm.recipe import differing
from moh_llm.records.identity import identify
from moh_llm.records.model import read_config
from moh_llm.vision import load_model, model_class
from moh_llm.vision.images import ImageSet, open_images
from moh_llm.vision.prediction import TIMESTEPS, add_noise, is_denoiser, predict

SAMPLING_STEPS = 250
BANDS = 5  # of timesteps; an image is scored once in each
GRID = 8  # samples a side


@torch.no_grad()
def score_images(
    network: nn.Module, images: ImageSet, numbers: Sequence[int], size: int, tokens: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The scores of each image: of a classifier `top1` and `top5`, of a DiT the squared `error` to the noise.

    A DiT's error is also given by bands of timesteps, such as `error_200_399`. Timesteps and noise of an image depend
    on its place in ``numbers`` alone, so that they are the same for all models. Models without classes have the
    `cosine` of their class `token` to ``tokens`` `[B, F]`, by default their own.
    """
    if not is_denoiser(network) and not hasattr(network, "classifier"):
        own = features_of(network, images, numbers, size)
        own /= np.linalg.norm(own, axis=1, keepdims=True)
        return {"token": own, "cosine": (own * (own if tokens is None else tokens)).sum(1)}
    device, found, width = next(network.parameters()).device, [], TIMESTEPS // BANDS
    for first in range(0, len(numbers), size):
        rows = numbers[first : first + size]
        pixels, labels = images.batch(rows), None if images.labels is None else images.labels[rows]
        if not is_denoiser(network):
            logits = finite(predict(network, {"pixel_values": pixels.to(device)})[0].cpu())
            hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            found.append(torch.stack([hits[:, 0], hits.any(1)], 1).double())
            continue
        labels = torch.full((len(rows),), network.config.num_embeds_ada_norm) if labels is None else labels
        draws = [torch.Generator().manual_seed(first + row) for row in range(len(rows))]
        errors = []
        for band in range(BANDS):
            bounds = band * width, (band + 1) * width, (1,)
            timestep = torch.cat([torch.randint(*bounds, generator=draw) for draw in draws])
            noise = torch.stack([torch.randn(pixels.shape[1:], generator=draw) for draw in draws])
            batch = {"hidden_states": add_noise(pixels, noise, timestep), "timestep": timestep, "class_labels": labels}
            output = finite(predict(network, {name: part.to(device) for name, part in batch.items()})[0].cpu())
            errors.append((output[:, : pixels.shape[1]] - noise).square().mean((1, 2, 3)))
        found.append(torch.stack([torch.stack(errors).mean(0), *errors], 1).double())
    bands = [f"error_{band * width}_{(band + 1) * width - 1}" for band in range(BANDS)]
    names = ["error", *bands] if is_denoiser(network) else ["top1", "top5"]
    return dict(zip(names, torch.cat(found).numpy().T, strict=True))


def finite(output: Tensor) -> Tensor:
    """A network's output. Raises UserError where it has NaN or infinity: classes would be chosen all the same."""
    if not output.isfinite().all():
        raise UserError("the model computes values that are not finite")
    return output


def paired(own: np.ndarray, base: np.ndarray, is_share: bool = False) -> dict[str, Any]:
    """Mean of scores `[B]`, difference and ratio to the base's, with 95 % intervals; of shares they are text's."""
    sums = np.stack([np.ones_like(own), own, base], 1)
    figures = {
        "value": lambda rows: rows[:, 1] / rows[:, 0],
        "difference": lambda rows: (rows[:, 1] - rows[:, 2]) / rows[:, 0],
        "ratio": lambda rows: rows[:, 1] / rows[:, 2],
    }
    if not base.any():
        del figures["ratio"]
    found: dict[str, Any] = {
        name: {"value": float(figure(sums.sum(0)[None])[0]), "interval": interval([sums], figure)}
        for name, figure in figures.items()
    }
    if is_share and len(own) > 1:
        ends = [mean_interval([part.tolist()], low, 1) for part, low in ((own, 0), (base, 0), (own - base, -1))]
        found["value"]["interval"], found["difference"]["interval"] = within(ends[0], 0, 1), within(ends[2], -1, 1)
        if "ratio" in found:
            ratio = ratio_interval(own.mean(), base.mean(), *((high - low) / 2 for low, high in ends))
            found["ratio"]["interval"] = ratio and within(ratio, 0, math.inf)
    return found


@torch.no_grad()
def draw_samples(network: nn.Module, count: int, size: int) -> Tensor:
    """Samples of a DiT on pixels, uint8 `[N, H, W, C]`: 250 steps of DDPM without guidance, ``size`` at a time.

    Classes take turns, and models of one size get the same noise.
    """
    from diffusers import DDPMScheduler

    config, device = network.config, next(network.parameters()).device
    is_learned = network.out_channels == 2 * config.in_channels
    scheduler = DDPMScheduler(variance_type="learned_range" if is_learned else "fixed_small")
    scheduler.set_timesteps(SAMPLING_STEPS)
    draw, drawn = torch.Generator().manual_seed(0), []
    for labels in (torch.arange(count) % config.num_embeds_ada_norm).split(size):
        pixels = torch.randn(len(labels), config.in_channels, config.sample_size, config.sample_size, generator=draw)
        for step in scheduler.timesteps:
            batch = {"hidden_states": pixels, "timestep": step.expand(len(labels)), "class_labels": labels}
            output = predict(network, {name: part.to(device) for name, part in batch.items()})[0].cpu()
            pixels = scheduler.step(output, step, pixels, generator=draw).prev_sample
        drawn.append(((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1))
    return torch.cat(drawn)


def write_samples(samples: Tensor, folder: Path, label: str) -> None:
    """Write ``LABEL.npz``, in colours as ADM's evaluator takes it, and the first samples as a grid, ``LABEL.png``."""
    from PIL import Image

    colours = samples.expand(*samples.shape[:3], 3).numpy()
    np.savez(folder / f"{label}.npz", arr_0=colours)
    side = min(GRID, int(len(colours) ** 0.5))
    rows = [np.concatenate(list(row), 1) for row in colours[: side**2].reshape(side, side, *colours.shape[1:])]
    Image.fromarray(np.concatenate(rows)).save(folder / f"{label}.png")


@torch.no_grad()
def features_of(network: nn.Module, images: ImageSet, numbers: Sequence[int], size: int) -> np.ndarray:
    """The class token after the last layer, float64 `[B, F]`."""
    device = next(network.parameters()).device
    batches = (images.batch(numbers[first : first + size]).to(device) for first in range(0, len(numbers), size))
    return torch.cat([network.base_model(batch).last_hidden_state[:, 0].cpu() for batch in batches]).double().numpy()


def _kind(folder: Path) -> str:
    """What models have in common that are compared, in words."""
    fields, name = read_config(folder), model_class(folder).__name__
    if "_class_name" in fields:
        return f"DiT on {fields.get('in_channels', 4)} x {' x '.join(2 * [str(fields.get('sample_size', 32))])}"
    return "classifier" if name.endswith("Classification") else f"no classes, width {fields.get('hidden_size', 768)}"


def evaluate(options: EvaluationConfig, command_line: str = "") -> dict[str, Any]:
    """Score models on images and draw samples; return the content of ``report.json``.

    Raises UserError where an option has no meaning for the models, or models, images or folder cannot be used.
    """
    if refused := sorted(differing(options).keys() & {"suite", "compute_dtype", "log_samples", "analysis"}):
        raise UserError(f"{refused[0]} has no meaning for models of images; leave it out")
    if options.data_dir is None:
        raise UserError("models of images are scored on images: name them as data_dir")
    place, models = str(options.data_dir), label_models(options.models, options.base)
    device, size = choose_device(options.device), 64 if options.batch_size == "auto" else options.batch_size
    check_output_folder(options.output_dir, options.overwrite, [place, *models.values()])
    split = None if Path(place).exists() else place.partition(":")[2] or "train"  # of a Hub dataset
    record: dict[str, Any] = {"command": command_line, "images": place, "split": split, "limit": options.limit}
    record["models"] = {}
    first: dict[str, np.ndarray] = {}
    sources = {label: locate(name)[0] for label, name in models.items()}
    (start, kind), *others = [(models[label], _kind(source)) for label, source in sources.items()]
    for name, other in others:
        if other != kind:
            raise UserError(f"{name} is another kind of model ({other}) than {start} ({kind}); leave one of them out")
    if options.samples and not kind.startswith(("DiT on 1 x", "DiT on 3 x")):
        raise UserError(f"samples are drawn by DiTs on pixels, and {start} is none ({kind}); leave samples out")
    with lock_folder(options.output_dir), new_folder(options.output_dir, options.overwrite) as folder:
        for label, name in models.items():
            source, network = sources[label], load_model(sources[label]).to(device)
            images = open_images(place, source, labelled=hasattr(network, "classifier"))
            numbers = images.spread(options.limit or len(images))
            own = score_images(network, images, numbers, size, first.get("token"))
            first = first or own
            compared = {key: paired(own[key], first[key], key[:3] == "top") for key in own if key != "token"}
            found = {"place": name, "sha256": identify(str(source)).sha256, "count": len(numbers), "scores": compared}
            record["models"][label] = found
            if options.samples:
                write_samples(draw_samples(network, options.samples, size), folder, label)
        write_json(folder / "report.json", record)
    return record


def read_scores(evaluation: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """The report that holds the model in ``folder``, known by its weights and config, and the model's label in it.

    ``evaluation`` is a folder of `moh-llm evaluate` or its ``report.json``. Raises UserError for one of other models.
    """
    place, own = evaluation / "report.json" if evaluation.is_dir() else evaluation, identify(str(folder))
    record = read_json(place)
    if not isinstance(record, dict) or not {"images", "models"} <= record.keys():
        raise UserError(f"{place} is not the report of an evaluation on images; name one that moh-llm evaluate wrote")
    label = next((label for label, found in record["models"].items() if found["sha256"] == own.sha256), None)
    if label is None:
        raise UserError(f"{evaluation} scored other models than the one in {folder}; evaluate {folder}")
    return record, label


def lines(record: dict[str, Any]) -> list[str]:
    """The scores of an evaluation in words, a line for each model; ratios are those to the first one."""
    said = []
    for label, model in record["models"].items():
        parts = []
        for name in (name for name in model["scores"] if not name.startswith("error_")):
            kinds = ("value",) if not said else ("value", "ratio")
            figures = {kind: model["scores"][name][kind] for kind in kinds if kind in model["scores"][name]}
            parts += [f"{name} {kind} {show_figure(*figure.values(), '.4f')}" for kind, figure in figures.items()]
        said.append(f"{label}: {', '.join(parts)}")
    return said
