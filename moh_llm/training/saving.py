"""The models that a run writes: the tuned one, and one that is exported from a checkpoint."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder
from moh_llm.locking import lock_folder
from moh_llm.recipe import read_options
from moh_llm.records.conversion import CONVERSION, LINEAGE
from moh_llm.records.identity import hash_model
from moh_llm.records.model import licence_texts, read_weight_map
from moh_llm.records.run import CheckpointRecord, RunRecord
from moh_llm.records.seal import find_fault, write_seal
from moh_llm.records.tensors import cast_weight, matrix_dtype, tensor_dtypes
from moh_llm.training import networks
from moh_llm.training.budget import Thresholds, set_thresholds
from moh_llm.training.checkpoints import newest_checkpoint, read_weights, verified_record
from moh_llm.training.config import TrainConfig
from moh_llm.training.reference import StartingPoint, find_starting_point
from moh_llm.training.runs import RUN_RECORD, Run, mark_model


def save_network(
    config: TrainConfig,
    checkpoint: Path,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    starting_point: StartingPoint,
    steps: int,
    thresholds: Thresholds | None = None,
) -> None:
    """Write the tuned model as a folder of its own: weights, config, tokenizer, remote code, lineage.

    Adapters are merged into the weights of ``config.model``. Each weight gets the dtype that it has there. The record
    of the conversion, which names the base, and the texts of the licence are copied.

    Trained weights are read from the ``checkpoint``, the others from ``config.model``. The run of ``steps`` steps is
    added to the lineage of the model that it began with.

    Raises:
        UserError: ``config.model`` cannot be read or is another model by now, or the disk refuses.
    """
    starting_point.check_model(config)
    network = networks.make_student(config)
    read_weights(checkpoint, networks.trained_weights(network))
    if config.lora is not None:
        network = network.merge_and_unload()
    if thresholds is not None:
        set_thresholds(network, thresholds)
    dtype = cast_as_stored(dict(network.named_parameters()), Path(config.model))
    with new_folder(folder, overwrite=True) as temporary:
        try:
            network.save_pretrained(temporary)
            network.config.dtype = dtype  # which `save_pretrained` takes from the first weight
            network.config.save_pretrained(temporary)
        except SafetensorError as error:  # how it reports a full disk
            raise UserError(f"cannot write {folder}: {' '.join(str(error).split())[:200]}; free some space") from error
        tokenizer.save_pretrained(temporary)
        add_records(temporary, config, starting_point, steps)


@torch.no_grad()
def cast_as_stored(weights: dict[str, torch.nn.Parameter], folder: Path) -> torch.dtype:
    """Cast weights, by their names in files, to their dtypes in a model's folder. Return that of the matrices there."""
    weight_map = read_weight_map(folder)[1]
    stored, dtype = tensor_dtypes(folder, weight_map), matrix_dtype(folder, weight_map) or torch.float32
    for name, weight in weights.items():
        weight.data = cast_weight(weight.data, stored.get(name, dtype), name)
    return dtype


def add_records(folder: Path, config: TrainConfig, starting_point: StartingPoint, steps: int) -> None:
    """Write licence, records and seal beside the tuned weights; the arguments are those of `save_network`."""
    for file in licence_texts(Path(config.model)):
        shutil.copyfile(file, folder / file.name)
    if (conversion := starting_point.records.conversion) is not None:
        conversion.write(folder / CONVERSION)
    made = hash_model(folder)
    starting_point.chain_after(config, steps, made).write(folder / LINEAGE)
    write_seal(folder, made)


def is_finished(run: Run, say: Callable[[str], None]) -> bool:
    """Whether a run is finished and its model whole; a damaged one is made anew from the last checkpoint.

    Raises UserError if the model is damaged and no checkpoint is left.
    """
    if run.record.status != "finished":
        return False
    fault = find_fault(run.model, run.record.model_files or {})
    if fault is None:
        return True
    if newest_checkpoint(run.checkpoints, say) is None:
        raise UserError(
            f"{run.model} is damaged ({fault}), and {run.checkpoints} holds no checkpoint to make it from; "
            "restore it, or pass --overwrite to start anew"
        )
    say(f"{run.model} is damaged ({fault}); it is made anew from the last checkpoint")
    return False


def export_checkpoint(checkpoint: Path, output: Path, overwrite: bool = False) -> CheckpointRecord:
    """Make a model folder like ``OUTPUT/model`` from ``OUTPUT/checkpoints/step-N``; return the checkpoint's record.

    The model that the run began with, and its base, must be where the run's recipe names them.

    Raises:
        UserError: the checkpoint is incomplete or damaged, the model that the run began with is missing or has changed,
            or ``output`` cannot be made.
    """
    try:
        record = verified_record(checkpoint)
    except UserError as error:
        raise UserError(f"{checkpoint} is no complete checkpoint: {error}") from error
    place = checkpoint.resolve().parent.parent / RUN_RECORD
    run = RunRecord.read(place)
    config = read_options(TrainConfig, [(str(place), *item) for item in run.config.items()])
    if config.images is not None:
        raise UserError(f"{place.parent} is a run on images: no model is made of its checkpoints; resume it to its end")
    check_output_folder(output, overwrite, [config.model, checkpoint])
    if mark_model(config) != run.model:
        raise UserError(f"model={config.model} is not what the run in {place.parent} began with; restore it")
    starting_point = replace(find_starting_point(config, run.reference), mixture=run.mixture)
    tokenizer = networks.load_tokenizer(Path(config.model))
    with lock_folder(output):
        check_output_folder(output, overwrite)  # another writer may have ended meanwhile
        save_network(config, checkpoint, tokenizer, output, starting_point, record.step)
    return record
