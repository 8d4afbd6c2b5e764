"""From a ViT, DeiT, DINOv2 or DiT to a converted folder: fit on images, write, verify; the model is in memory.

The parts are those of text (`moh_llm.conversion`): one backward pass gives each layer's sample, in which an image is
one prediction. y is drawn from the classes' probabilities or, where a model has no classes, from a normal distribution
around its output. A DiT is fitted at timesteps that are spread evenly.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from moh_llm import vision
from moh_llm.conversion.base import FORGOTTEN, MOH_FIELDS, BaseCheckpoint, accompanying, locate
from moh_llm.conversion.calibrate import HELD_OUT, fit_layer, join_sample, make_fitter, recording
from moh_llm.conversion.checkpoint import write_description, write_weights
from moh_llm.conversion.config import ConversionConfig
from moh_llm.conversion.convert import begin_record, count_parameters, finish_record, read_base_records
from moh_llm.conversion.fit import LayerSample, RoutingFit
from moh_llm.conversion.plan import head_fields, plan_layers, routing_tensors, shared_and_active
from moh_llm.devices import choose_device
from moh_llm.errors import UserError, reason
from moh_llm.files import check_links, check_output_folder, new_folder, write_json
from moh_llm.locking import lock_folder
from moh_llm.recipe import differing
from moh_llm.records.conversion import Calibration, Conversion, ImageFigures, Plan, last_component
from moh_llm.records.model import CONFIG, read_config, read_weight_map
from moh_llm.records.tensors import cast_weight, is_routing_weight
from moh_llm.vision.images import ImageSet, open_images
from moh_llm.vision.prediction import TIMESTEPS, add_noise, is_denoiser, predict

_OPTIONS = {"base", "output_dir", "overwrite", "calibration", "calibration_tokens", "preset", "num_shared_heads"}
_OPTIONS |= {"num_active_heads", "shared", "router", "budgets", "fallback"}
_OF_MOH = {"auto_map", "heads_per_layer", "image_processor_type"}  # other fields that a converted model has
_BATCH, _LEAST = 16, 16  # images at once, and the fewest to fit on


class _DiTConfig(SimpleNamespace):
    """A DiT's `config.json`, with the names that configurations of transformers have."""

    def __init__(self, fields: dict[str, Any]):
        heads, layers, name = (fields[key] for key in ("num_attention_heads", "num_layers", "_class_name"))
        super().__init__(fields=fields, num_attention_heads=heads, num_hidden_layers=layers, architectures=[name])
        self.model_type = "dit"

    def save_pretrained(self, folder: Path) -> None:
        write_json(folder / CONFIG, self.fields)


def open_image_base(name: str) -> BaseCheckpoint:
    """Find a base, or the dense model inside a MoH one. Raises UserError for a model that cannot be converted."""
    folder, commit = locate(name)
    check_links(folder, [folder / CONFIG, *accompanying(folder)])
    fields, kind = read_config(folder), vision.model_class(folder, moh=False)
    if fault := next((key for key in ("quantization_config", "heads_per_layer") if fields.get(key)), None):
        raise UserError(f"{name} has a {fault}: there is no dense model of full precision inside")
    shards, weight_map = read_weight_map(folder)
    check_links(folder, shards)
    dense = {tensor: file for tensor, file in weight_map.items() if not is_routing_weight(tensor)}
    own = {key: value for key, value in fields.items() if key not in MOH_FIELDS | _OF_MOH}
    if "_class_name" in fields:
        config: Any = _DiTConfig(own | {"_class_name": kind.__name__})
    else:
        own |= {"architectures": [kind.__name__], "model_type": kind.config_class.model_type}
        config = kind.config_class.from_dict(own)
    name, is_moh = name if commit is None else name.partition("@")[0], kind is not vision.model_class(folder)
    return BaseCheckpoint(name, folder, commit, is_moh, config, dense)


def convert_images(options: ConversionConfig) -> Conversion:
    """Convert a model of images, verify it, and return the record of `conversion.json`.

    Raises:
        UserError: bad input, or an option that has no meaning for images; the output folder is then unchanged.
    """
    started = time.perf_counter()
    plan = _plan(options)
    [place] = plan.calibration
    check_output_folder(options.output_dir, options.overwrite, reads=[options.base, place])
    base, device = open_image_base(options.base), choose_device()
    records = read_base_records(base)
    shared_and_active(plan, base.config)  # impossible counts fail before anything runs
    images = open_images(place, base.folder)
    dense = vision.load_model(base.folder, moh=False).float().to(device).requires_grad_(False)
    patches = images.batch([0])[0, 0].numel() // dense.config.patch_size**2
    fitted = min(plan.calibration_tokens // patches, len(images) * 4 // 5)
    least = 2 * _LEAST if is_denoiser(dense) else _LEAST  # so that each quarter of the timesteps is verified on two
    if fitted < least:
        raise UserError(f"{place} and --calibration-tokens leave {fitted} images to fit on, and {least} are needed")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    with lock_folder(options.output_dir), new_folder(options.output_dir, options.overwrite) as folder:
        record = begin_record(base.identity(), device, torch.float32)
        calibrated = None
        if plan.needs_calibration:
            samples = _samples(dense, images, order[:fitted])
            calibrated = [fit_layer(plan, base.config, make_fitter(plan, base.config, sample)) for sample in samples]
            read = fitted * patches
            record.calibration = Calibration(tokens=read, tokens_of_source={last_component(place): read})
        record.plan = Plan(preset=plan.preset)
        config, fits = plan_layers(plan, base.config, calibrated, partial(_build_config, base.folder))
        routing = {name: cast_weight(tensor, base.dtype, name) for name, tensor in _named(dense, fits).items()}
        weight_map = write_weights(folder, base, routing)
        record.parameters = count_parameters(base, routing)
        write_description(folder, base, config, weight_map, remote_code=False)
        converted = vision.load_model(folder).float().to(device)
        record.images = _verify(dense, converted, images, order[fitted:][: max(_LEAST, fitted) // HELD_OUT])
        finish_record(folder, record, records.chain, started)
    return record


def _plan(options: ConversionConfig) -> ConversionConfig:
    """The options with the defaults of images. Raises UserError for those that have no meaning for images."""
    refused = sorted(differing(options).keys() - _OPTIONS)
    of_text = {"fallback": "local", "router": "threshold"}
    refused += [f"{name} {value}" for name, value in of_text.items() if getattr(options, name) == value]
    if refused:
        raise UserError(f"{options.base} is a model of images; drop {', '.join(refused)}, which is for text")
    if options.calibration is None or len(options.calibration) != 1:
        raise UserError(f"{options.base} is a model of images; name one place of images with --calibration")
    if options.preset is not None or options.router == "query_norm":
        return replace(options, fallback=options.fallback or "none")
    shared = 0 if options.num_shared_heads is None and options.router != "none" else options.num_shared_heads
    return replace(options, fallback=options.fallback or "value", num_shared_heads=shared)


def _batches(model: nn.Module, images: ImageSet, numbers: Tensor) -> Iterator[dict[str, Tensor]]:
    """What the model takes of images; a DiT also takes noise, and timesteps that these images spread evenly."""
    generator = torch.Generator().manual_seed(0)
    spread = (torch.arange(len(numbers)) + 0.5) * TIMESTEPS / len(numbers)
    for chosen, timestep in zip(numbers.split(_BATCH), spread.long().split(_BATCH), strict=True):
        inputs = {"pixel_values": images.batch(chosen)}
        if is_denoiser(model):
            pixels, no_class = inputs.pop("pixel_values"), torch.full_like(chosen, model.config.num_embeds_ada_norm)
            inputs["hidden_states"] = add_noise(pixels, torch.randn(pixels.shape, generator=generator), timestep)
            inputs["class_labels"] = no_class if images.labels is None else images.labels[chosen]
            inputs["timestep"] = timestep
        yield {name: tensor.to(model.device) for name, tensor in inputs.items()}


def _attention(model: nn.Module) -> dict[str, nn.Module]:
    """Attention of each layer by its name, first layer first."""
    return {name: module for name, module in model.named_modules() if re.search(r"\.\d+\.(attention|attn1)$", name)}


def _samples(model: nn.Module, images: ImageSet, numbers: Tensor) -> Iterator[LayerSample]:
    """Yield the sample of each layer, in which every fourth image is held out."""
    layers, generator = list(_attention(model).values()), torch.Generator().manual_seed(0)
    value, out = ("to_v", "to_out.0") if is_denoiser(model) else ("v_proj", "o_proj")
    outs = [layer.get_submodule(out) for layer in layers]
    seen: list[dict[str, list[Tensor]]] = [{} for _ in layers]
    with ExitStack() as hooks, tqdm(total=len(numbers), desc="calibrate", unit="image") as bar:
        for parts in zip(layers, outs, seen, strict=True):
            hooks.enter_context(recording(parts[0], parts[0].get_submodule(value), *parts[1:]))
        for inputs in _batches(model, images, numbers):
            pixels = next(iter(inputs.values())).requires_grad_(True)
            output = predict(model, inputs)[0]
            if output.dim() == 2:  # the gradient of -log p(y) is p - onehot(y), or else the output minus y
                gradient = output.detach().softmax(-1)
                drawn = gradient.cpu().multinomial(1, generator=generator).to(output.device)
                gradient.scatter_add_(1, drawn, -torch.ones_like(gradient[:, :1]))
            else:
                gradient = torch.randn(output.shape, generator=generator).to(output)
            torch.autograd.grad(output, pixels, gradient)
            bar.update(len(pixels))
    rows = torch.arange(sum(map(len, seen[0]["inputs"]))).view(len(numbers), -1)
    held_out = torch.arange(len(numbers)) % HELD_OUT == HELD_OUT - 1
    order, fitted = torch.cat([rows[~held_out], rows[held_out]]).flatten(), rows[~held_out].numel()
    heads, tokens = model.config.num_attention_heads, rows.shape[1]
    for of, out in zip(seen, outs, strict=True):
        yield join_sample(of, out, heads, order, fitted, together=tokens)


def _build_config(
    folder: Path, config: Any, plan: ConversionConfig, shared: list[list[int]], active: list[int], *_: Any
) -> Any:
    """The converted model's config. Raises UserError for an impossible head plan."""
    kind, fields = vision.model_class(folder, moh=True), head_fields(plan, shared, active)
    try:
        if isinstance(config, _DiTConfig):
            own = {key: value for key, value in config.fields.items() if not key.startswith("_")}
            with torch.device("meta"):
                return _DiTConfig(json.loads(kind(**own, **fields).to_json_string()))
        built = kind.config_class(**{k: v for k, v in config.to_dict().items() if k not in FORGOTTEN}, **fields)
    except ValueError as error:
        raise UserError(f"impossible head plan: {reason(error)}") from error
    built.architectures, built.dtype = [kind.__name__], config.dtype
    # Old image processors name no class, and have that of the base's model_type.
    built.image_processor_type = IMAGE_PROCESSOR_MAPPING_NAMES[config.model_type]["torchvision"]
    return built


def _named(dense: nn.Module, fits: Sequence[RoutingFit]) -> dict[str, Tensor]:
    """The fitted tensors by their names in the files."""
    first = next(iter(_attention(dense)))
    path = first.replace(".0.", ".{}.") + (".processor" if first.endswith("attn1") else "")
    tensors = routing_tensors(fits, path)
    return tensors if first.endswith("attn1") else revert_weight_conversion(dense, tensors)


@torch.no_grad()
def _verify(dense: nn.Module, converted: nn.Module, images: ImageSet, numbers: Tensor) -> ImageFigures:
    """Compare the converted model with its base. Raises UserError if they differ with all heads on."""
    outputs, timesteps = [], []
    for inputs in _batches(dense, images, numbers):
        expected = predict(dense, inputs)[0]
        with converted.all_heads_active():
            if not torch.equal(predict(converted, inputs)[0], expected):
                raise UserError("with all heads on the output is not the base's; nothing was written. Please report it")
        outputs.append(torch.stack([expected, predict(converted, inputs)[0]]).cpu())
        timesteps.append(inputs.get("timestep", torch.zeros(0)).cpu())
    base, own = torch.cat(outputs, 1)
    found: dict[str, Any] = {"images": len(base), "equals_base": True, "error": _error(base, own)}
    if base.dim() == 2:
        of_base, of_own = base.log_softmax(-1), own.log_softmax(-1)
        found["kl"] = ((of_base.exp() * (of_base - of_own)).sum() / len(base)).item()
        found["same_class"] = (base.argmax(-1) == own.argmax(-1)).double().mean().item()
    if is_denoiser(dense):
        quarter = torch.cat(timesteps) * 4 // TIMESTEPS
        found["by_timestep"] = [_error(base[quarter == n], own[quarter == n]) for n in range(4)]
    return ImageFigures(**found)


def _error(base: Tensor, own: Tensor) -> float:
    """Mean squared difference of outputs `[N, ...]`, as a share of the variance of the first over the images."""
    return ((own - base).square().mean() / (base - base.mean(0)).square().mean()).item()


def describe(record: Conversion, folder: Path) -> list[str]:
    """What was converted and how close to its base it is, as lines."""
    lines = describe_plan(read_config(folder))
    lines[0] = f"{record.base.label}: {lines[0]}"
    if read := record.calibration:
        lines.append(f"fitted to {read.tokens:,} tokens of {', '.join(read.tokens_of_source)}")
    return lines + describe_figures(record.images)


def describe_plan(fields: dict[str, Any]) -> list[str]:
    """The head plan in a `config.json`, as lines."""
    layers, active = fields.get("num_layers") or fields["num_hidden_layers"], fields["num_active_heads"]
    active = active if isinstance(active, list) else [active] * layers
    heads = fields.get("heads_per_layer") or [fields["num_attention_heads"]]
    of = heads[0] if len({*heads}) == 1 else f"{min(heads)} to {max(heads)}"
    return [
        f"{layers} layers of {of} heads, {sum(active) / layers:.4g} on for each token",
        f"on by layer: {' '.join(map(str, active))}",
        f"router {fields['router_type']}, fallback {fields['head_fallback']}",
    ]


def describe_figures(found: ImageFigures) -> list[str]:
    """How close a converted model is to its base, as lines."""
    lines = [
        f"all heads on: the output is the base's, bit for bit, on {found.images} held-out images",
        f"as planned: squared error {found.error:.2%} of the variance of the base's output",
    ]
    if found.kl is not None:
        lines.append(f"KL to the base {found.kl:.3g} nats, same class for {found.same_class:.1%} of the images")
    if found.by_timestep:
        lines.append(f"by quarter of the timesteps: {', '.join(f'{error:.2%}' for error in found.by_timestep)}")
    return lines
