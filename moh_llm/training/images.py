"""Training of ViTs and DiTs: what is other than for language models, whose loop, folder and checkpoints they have.

Shapes: B images, C channels, H x W pixels.
"""

import copy
import hashlib
import math
import shutil
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from moh_llm.conversion.base import locate
from moh_llm.data.stream import SequenceStream, permute
from moh_llm.errors import UserError
from moh_llm.files import new_folder
from moh_llm.options import options_of
from moh_llm.records.conversion import last_component
from moh_llm.records.identity import hash_model, identify, read_records
from moh_llm.records.model import read_config
from moh_llm.records.run import LogLine, ModelMark
from moh_llm.records.seal import SEAL, mark_files
from moh_llm.records.tensors import is_routing_weight
from moh_llm.training.config import TrainConfig
from moh_llm.training.loop import Training
from moh_llm.training.losses import StepLosses
from moh_llm.training.networks import count_weights, trained_weights
from moh_llm.training.reference import Reference, StartingPoint
from moh_llm.training.runs import check_data
from moh_llm.training.saving import add_records, cast_as_stored
from moh_llm.training.sharding import Networks
from moh_llm.training.step import make_optimizer
from moh_llm.vision import load_model
from moh_llm.vision.gated_heads_moh import batch_balance_loss
from moh_llm.vision.images import ImageSet, open_images
from moh_llm.vision.prediction import TIMESTEPS, add_noise, denoising_loss, is_denoiser, predict

HELD_OUT = 1024  # images that are scored in a run
_AVERAGE = "average."  # before the names of averaged weights
# Options that have no meaning for images.
_OF_TEXT = ("gate_gradient", "gradient_checkpointing", "lora", "data.mixture")
_OF_TEXT += ("data.sequence_length", "objective.keys", "evaluation.max_tokens")


class ImageStream(SequenceStream):
    """Images in an endless order, which holds each once per epoch and is another in each epoch."""

    def __init__(self, images: ImageSet, seed: int):
        self.images, self.seed = images, seed

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        """The images at places `first` to `first + count - 1`, as `read` gives them."""
        places = (divmod(place, len(self.images)) for place in range(first, first + count))
        return self.read([permute(place, len(self.images), f"{self.seed}/{epoch}") for epoch, place in places])

    def read(self, numbers: list[int]) -> dict[str, Tensor]:
        """Pixels `[B, C, H, W]` and labels `[B]` of these images; the labels are -1 where there are none."""
        labels = torch.full((len(numbers),), -1) if self.images.labels is None else self.images.labels[numbers]
        return {"pixels": self.images.batch(numbers), "labels": labels}


class ImageStep(nn.Module):
    """The losses of a micro-batch: a student's, to a frozen teacher or, without one, to labels or noise."""

    def __init__(self, student: nn.Module, teacher: nn.Module | None, config: TrainConfig):
        super().__init__()
        self.student, self.teacher, self.images = student, teacher, config.images
        is_routed = any(router.num_routed for router in getattr(student, "routers", []))
        given = config.objective.balance_coefficient
        self.beta = None if not is_routed else student.config.head_balance_coef if given is None else given

    def forward(self, target: Tensor, **batch: Tensor) -> Tensor:
        """Task loss, load-balance loss and accuracy (0 without classes), `[3]`, each a mean over the images.

        ``target`` is labels `[B]`, or for a DiT images and noise, `[B, 2, C, H, W]`.
        """
        output, router_logits = predict(self.student, batch)
        output = output.to(exact := torch.promote_types(output.dtype, torch.float32))  # under autocast it has 16 bits
        has_classes = output.dim() == 2
        if self.teacher is not None:
            with torch.no_grad():
                reference = predict(self.teacher, batch)[0]
            if has_classes:
                own, other = output.log_softmax(-1), reference.to(exact).log_softmax(-1)
                task = F.kl_div(own, other, reduction="batchmean", log_target=True)
            else:
                task = F.mse_loss(output, reference.to(exact))
        elif is_denoiser(self.student):
            task = denoising_loss(output, *target.unbind(1), batch["hidden_states"], batch["timestep"])
        else:
            task = F.cross_entropy(output, target, label_smoothing=self.images.label_smoothing)
        balance = batch_balance_loss(router_logits, self.student.routers) if self.beta is not None else 0 * task
        right = (output.argmax(-1) == target).to(task).mean() if has_classes else 0 * task
        return torch.stack([task, balance, right])

    def make_inputs(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Arguments of `forward` for images `[B, C, H, W]` and labels `[B]`, drawn by torch's generator.

        In training images are mirrored and a DiT's labels are dropped, once for all of its blocks, each of which would
        drop others. A label of -1 is always dropped.
        """
        if self.training and self.images.flip:
            pixels = torch.where(torch.rand(len(pixels), 1, 1, 1) < 0.5, pixels.flip(-1), pixels)
        if not is_denoiser(self.student):
            return {"pixel_values": pixels, "target": labels}
        timestep, noise = torch.randint(TIMESTEPS, (len(pixels),)), torch.randn_like(pixels)
        dropped = labels < 0
        if self.training:
            dropped |= torch.rand(len(pixels)) < self.images.label_dropout
        labels = torch.where(dropped, self.student.config.num_embeds_ada_norm, labels)
        noised, target = add_noise(pixels, noise, timestep), torch.stack([pixels, noise], 1)
        return {"hidden_states": noised, "timestep": timestep, "class_labels": labels, "target": target}

    def train(self, mode: bool = True) -> "ImageStep":
        """Set the student's mode. The teacher has no dropout, and a DiT's blocks drop no labels."""
        super().train(mode)
        for module in self.student.modules():
            if hasattr(module, "token_drop"):
                module.eval()
        if self.teacher is not None:
            self.teacher.eval()
        return self


class ImageTraining(Training):
    """The phases of a run on images."""

    @staticmethod
    def mark(config: TrainConfig) -> ModelMark:
        """Hash the model that the run begins with. Raises UserError for options that have no meaning for images."""
        for name in _OF_TEXT:
            if attrgetter(name)(config) != options_of(TrainConfig)[name].default:
                raise UserError(f"{name} has no meaning for images; remove it from the recipe")
        read_config(Path(config.model))
        return ModelMark(sha256=identify(config.model).sha256)

    def check_again(self) -> None:
        """Images are not checked again."""

    def prepare(self) -> None:
        """Load the model and what it learns from, and open the images."""
        config, accelerator = self.config, self.accelerator
        if accelerator.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise UserError("models of images are trained by one process or ddp; choose another accelerate config")
        folder, kind = Path(config.model), config.objective.kind
        network = load_model(folder).float()
        if not {"noise": is_denoiser(network), "cross_entropy": hasattr(network, "classifier")}.get(kind, True):
            raise UserError(f"objective.kind={kind} is not for a {type(network).__name__}; set another one")
        for name, weight in network.named_parameters():  # nothing masks patches; DDP waits for every gradient
            weight.requires_grad_((is_routing_weight(name) or not config.freeze_base) and "mask_token" not in name)
        if not (weights := trained_weights(network)):
            raise UserError(f"freeze_base=true leaves nothing to train in model={config.model}; set it to false")
        for line in (records := read_records(folder)).lines(f"model={config.model}"):
            self.say(line)
        teacher = make_teacher(config, network) if config.objective.has_teacher else None
        reference = teacher and Reference("named" if config.base else "start", own=config.base is None)
        self.start = StartingPoint(records, reference, last_component(config.images.train))
        images = open_images(config.images.train, folder, kind == "cross_entropy")
        self.stream, step = ImageStream(images, config.seed), ImageStep(network, teacher, config)
        if teacher is not None and config.base is not None:
            check_base(config, step, self.stream)
        if class_names(network)[:1] == ["LABEL_0"]:  # names that stand for none
            names = images.class_names if teacher is None else class_names(teacher)
            network.config.id2label = dict(enumerate(names))
            network.config.label2id = {name: number for number, name in enumerate(names)}
        place, has_classes = config.images.held_out, hasattr(network, "classifier")
        try:
            held_out = place and open_images(place, folder, has_classes, class_names(network))
        except UserError as error:
            if kind == "cross_entropy":
                raise
            held_out = replace(open_images(place, folder), labels=None)  # a teacher needs none
            self.say(f"accuracy is not measured: {error}")
        self.held_out = held_out and ImageStream(held_out, config.seed)
        check_data(self.run.folder, self.run.record, self.facts()["data"])
        step.to(accelerator.device)
        optimizer, decay = make_optimizer(network, config), config.images.ema_decay
        averages = {_AVERAGE + name: weight.detach().clone() for name, weight in weights.items() if decay}
        pairs = [(averages[_AVERAGE + name], weight.detach()) for name, weight in weights.items() if decay]
        optimizer.register_step_post_hook(lambda *_: [mean.lerp_(weight, 1 - decay) for mean, weight in pairs])
        model, optimizer = accelerator.prepare(step, optimizer)
        self.networks = Networks(model, optimizer, weights | averages, network, count_weights(network))
        self.step, self.balance_coefficient, self.budget = step, step.beta, None

    def facts(self) -> dict[str, Any]:
        """What identifies the images, and what the run distills from."""
        images, reference = self.stream.images, self.start.reference
        digest = None if images.labels is None else hashlib.sha256(images.labels.numpy().tobytes()).hexdigest()
        return {"data": {"images": len(images), "labels_sha256": digest}, "reference": reference and reference.kind}

    def of_step(self) -> str:
        return f"{self.config.data.batch_size} of {len(self.stream.images):,} images"

    def receipt(self, step: int) -> dict[str, Any]:
        """Images have no sources."""
        return {}

    def gradients(self, batch: dict[str, Tensor]) -> tuple[StepLosses, float]:
        config, accelerator, model = self.config, self.accelerator, self.networks.model.train()
        inputs, count = self.step.make_inputs(**batch), len(batch["labels"])
        means = torch.zeros(3, device=accelerator.device)
        for rows in torch.arange(count).split(config.data.micro_batch_size):
            with accelerator.accumulate(model):
                losses = model(**{name: part[rows].to(means.device) for name, part in inputs.items()})
                accelerator.backward(losses[0] + (self.balance_coefficient or 0.0) * losses[1])
                means += losses.detach() * len(rows) / count
        task, balance, _ = accelerator.reduce(means, "mean").tolist()
        trained = [weight for weight in self.networks.weights.values() if weight.requires_grad]
        norm = accelerator.clip_grad_norm_(trained, config.optimizer.max_grad_norm or math.inf)
        on = [router.num_active for router in getattr(self.step.student, "routers", [])]
        return StepLosses(task, math.nan, balance, heads_read=sum(on) / max(1, len(on))), float(norm)

    @torch.no_grad()
    def score(self, line: LogLine) -> None:
        """Put the task loss on held-out images, and a classifier's accuracy, into a line of the log."""
        if self.held_out is None:
            return
        images, step = self.held_out.images, self.step.eval()
        numbers, size = images.spread(HELD_OUT), self.config.data.micro_batch_size
        torch.manual_seed(self.config.seed)  # the same noise each time; a step sets a seed of its own
        sums = torch.zeros(3, device=self.accelerator.device)
        for rows in (numbers[first : first + size] for first in range(0, len(numbers), size)):
            inputs = step.make_inputs(**self.held_out.read(rows))
            sums += step(**{name: part.to(sums.device) for name, part in inputs.items()}) * len(rows)
        task, _, right = (sums / len(numbers)).tolist()
        line.held_out = {"images": len(numbers), "task_loss": task}
        if images.labels is not None and hasattr(step.student, "classifier"):
            line.held_out["top1"] = right
        shown = ", ".join(f"{name} {value:.4g}" for name, value in line.held_out.items() if name != "images")
        self.say(f"step {line.step}: on {len(numbers):,} held-out images {shown}")

    def save_tuned_model(self) -> None:
        """Save the tuned model, or its average, score it, and finish the run's record."""
        config, run, weights = self.config, self.run, self.networks.weights
        self.checkpoints.wait()
        with torch.no_grad():
            for name in [name for name in weights if name.startswith(_AVERAGE)]:
                weights[name.removeprefix(_AVERAGE)].copy_(weights[name])
        student, files, made = self.step.student, {}, None
        named = dict(student.named_parameters())  # transformers has other names in files
        named = named if is_denoiser(student) else revert_weight_conversion(student, named)
        cast_as_stored(named, Path(config.model))
        if self.accelerator.is_main_process:
            with new_folder(run.model, overwrite=True) as temporary:
                student.save_pretrained(temporary)
                if (processor := Path(config.model, "preprocessor_config.json")).is_file():
                    shutil.copyfile(processor, temporary / processor.name)
                add_records(temporary, config, self.start, config.max_steps)
            files, made = mark_files(run.model), hash_model(run.model)
            files.pop(SEAL)  # it covers the card, which is written when the run is finished
            self.say(f"{run.model} is written after {config.max_steps} steps, {self.seconds:.0f} s of training")
        student.float()  # the numbers that were saved
        self.score(line := LogLine(step=config.max_steps))
        run.finish(files, seconds=round(self.seconds, 3), made=made, held_out=getattr(line, "held_out", None))


def class_names(network: nn.Module) -> list[str]:
    """The names of a network's classes in their order. Those of a DiT are empty; backbones have no classes."""
    if is_denoiser(network):
        return [""] * network.config.num_embeds_ada_norm
    return [name for _, name in sorted(network.config.id2label.items())] if hasattr(network, "classifier") else []


@torch.no_grad()
def check_base(config: TrainConfig, step: ImageStep, stream: ImageStream) -> None:
    """Raise UserError where ``config.base`` has other outputs, classes or pixels than the model."""
    both, numbers, fits = (step.teacher, step.student), stream.images.spread(4), False
    inputs = step.eval().make_inputs(**(given := stream.read(numbers)))
    del inputs["target"]
    with suppress(TypeError, ValueError, RuntimeError):  # of a base that does not take them
        fits = len({predict(network, inputs)[0].shape for network in both}) == 1
    names, own = map(class_names, both)
    where = f"base={config.base} does not fit model={config.model}: it has other"
    if not fits or len(names) != len(own):
        raise UserError(f"{where} outputs; name a base of the same kind, sizes and number of classes")
    if names != own and "LABEL_0" not in (names[0], own[0]):
        raise UserError(f"{where} names of classes, or another order; name a base with the same id2label")
    if not torch.equal(given["pixels"], open_images(stream.images.place, locate(config.base)[0]).batch(numbers)):
        raise UserError(f"{where} pixels of the same image; give both the same preprocessor_config.json")


def make_teacher(config: TrainConfig, network: nn.Module) -> nn.Module:
    """What a run distills from, frozen: ``config.base``, or the model that the run begins with, with all heads on.

    Raises UserError where that is no dense model: it has no routers, or weighs heads by their scores.
    """
    if config.base is not None:
        return load_model(locate(config.base)[0]).float().requires_grad_(False)
    if getattr(network.config, "router_score", None) != "quantized":
        raise UserError(f"model={config.model} holds no base to distill from: name a base, or another objective.kind")
    teacher = copy.deepcopy(network).eval().requires_grad_(False)
    teacher.set_active_heads([router.num_heads for router in teacher.routers])
    return teacher
