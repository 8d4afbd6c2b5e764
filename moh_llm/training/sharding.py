"""The networks of a run, built and distributed over the processes. Under FSDP2 no process ever holds a whole model.

There the networks are built without weights (`networks.load_network(..., empty=True)`) and divided, and each process
then reads the slices that it holds from the safetensors files. ZeRO-3 divides models in `from_pretrained`, for which
the first process reads weight by weight. Under DDP, ZeRO-1 and 2 every process reads whole models itself, by memory
maps, so that a machine reads them from disk once.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed import checkpoint as dcp

from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.model import read_weight_map
from moh_llm.training import networks
from moh_llm.training.config import TrainConfig
from moh_llm.training.parallel import dividing_as_zero3, from_main
from moh_llm.training.reference import Reference
from moh_llm.training.step import TrainingStep, make_optimizer, seed_step


@dataclass
class Networks:
    """What a run trains, distributed over the processes."""

    model: nn.Module  # the `TrainingStep`, with the teacher in it
    optimizer: torch.optim.Optimizer
    weights: dict[str, nn.Parameter]  # those that are trained, by name
    network: MoHLlamaForCausalLM  # the student without adapters
    counts: dict[str, int]  # of weights, in all and by kind (`count_weights`)


def build_networks(
    config: TrainConfig, accelerator: Accelerator, reference: Reference | None, say: Callable[[str], None]
) -> Networks:
    """Build student, teacher and optimizer, and distribute them. Raises UserError where the model cannot be read."""
    # On one process, since all would refuse.
    if note := from_main(accelerator, lambda: networks.check_network(Path(config.model)).note):
        say(f"warning: {config.model}: {note}")
    seed_step(config, 0, 0)  # adapters are drawn alike on all processes, and each keeps its part
    with dividing_as_zero3(accelerator):
        empty = accelerator.is_fsdp2
        student = networks.make_student(config, empty)
        teacher = networks.make_teacher(config, reference, accelerator.device, empty)
        counts = networks.count_weights(student)
        model, optimizer = distribute(accelerator, TrainingStep(student, teacher, config.objective, reference), config)
    model.train()
    step = accelerator.unwrap_model(model)
    return Networks(model, optimizer, networks.trained_weights(step.student), step.network, counts)


def distribute(
    accelerator: Accelerator, module: TrainingStep, config: TrainConfig
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The prepared module and its optimizer. Under FSDP2 the module has no weights yet, except adapters."""
    if not accelerator.is_fsdp2:
        return accelerator.prepare(module, make_optimizer(module.student, config))
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = fsdp2_prepare_model(accelerator, module)
    offloads = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    device = torch.device("cpu") if offloads else accelerator.device
    read_slices(module.network, Path(config.model), device)
    if module.teacher is not None:
        read_slices(module.teacher, Path(module.teacher.name_or_path), device)
    # Made of the slices: `Accelerator.prepare` tells weights apart by addresses, which those without numbers lack.
    return model, accelerator.prepare_optimizer(make_optimizer(module.student, config))


def read_slices(network: nn.Module, folder: Path, device: torch.device) -> None:
    """Give a divided network its weights; this process reads of each what it holds."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    read: dict[str, torch.Tensor] = {}
    for name, weight in list(network.named_parameters(remove_duplicate=False)):
        if not weight.is_meta:
            continue
        if weight not in made:
            made[weight] = nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
            read[name.replace(".base_layer.", ".")] = made[weight].detach()  # peft's name for what it adapts
        module, _, key = name.rpartition(".")
        setattr(network.get_submodule(module), key, made[weight])
    with tempfile.TemporaryDirectory(prefix="moh-llm-weights-") as links:  # the reader takes all files of a folder
        for file in read_weight_map(folder)[0]:
            Path(links, file.name).symlink_to(file.resolve())
        dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(links))
