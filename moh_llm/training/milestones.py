"""The models of checkpoints: those of a run's milestones, and one that is exported.

    OUTPUT/milestones/step-000100/model/     the model after 100 steps, to be used like any other
                                  run.json   the run's record up to that step
                                  log.jsonl  its log up to that step

A milestone reads as a run that ended there, so a card or a report shows what held then.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder
from moh_llm.locking import lock_folder
from moh_llm.recipe import read_options
from moh_llm.records.run import CheckpointRecord, RunRecord
from moh_llm.terminal import say_aside
from moh_llm.training import networks
from moh_llm.training.changed_keys import GONE, without_gone_keys
from moh_llm.training.checkpoints import RECORD, verified_record
from moh_llm.training.config import TrainConfig
from moh_llm.training.parallel import loading_full_models
from moh_llm.training.reference import StartingPoint, find_starting_point
from moh_llm.training.runs import LOG, Run, mark_model
from moh_llm.training.runs import RECORD as RUN_RECORD


def is_milestone(config: TrainConfig, step: int) -> bool:
    """Whether the recipe asks for the model after that step."""
    return config.hub is not None and config.hub.milestones and step % config.checkpoint.milestone_every == 0


def keep_milestone(
    config: TrainConfig,
    run: Run,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    starting_point: StartingPoint,
    on_milestone: Callable[[Path], None],
    step: int,
    checkpoint: Path,
) -> None:
    """Save the model of a checkpoint, if the recipe asks for it, and call ``on_milestone`` with its folder.

    The main process does it alone; the others wait in their next step.

    Args:
        config, run, accelerator, tokenizer, starting_point: of the run, whose log ends with that step.
        on_milestone: see `moh_llm.training.loop.train`.
        step: how many steps were made.
        checkpoint: the folder of the checkpoint after them, complete.

    Raises:
        UserError: the disk refuses, or ``config.model`` can no longer be read.
    """
    if not (is_milestone(config, step) and accelerator.is_main_process):
        return
    state, folder = CheckpointRecord.read(checkpoint / RECORD), run.milestones / checkpoint.name
    with new_folder(folder, overwrite=True) as temporary:
        with loading_full_models(accelerator):
            networks.save_network(config, checkpoint, tokenizer, temporary / "model", starting_point, step)
        facts = {"steps": step, "tokens": step * config.tokens_per_step, "seconds": state.seconds}
        run.record.model_copy(update={**facts, "data_read": state.data}).write(temporary / RUN_RECORD)
        shutil.copyfile(run.folder / LOG, temporary / LOG)
    on_milestone(folder)


def export_checkpoint(checkpoint: Path, output: Path, overwrite: bool = False) -> CheckpointRecord:
    """Make a model folder, like ``OUTPUT/model``, of ``OUTPUT/checkpoints/step-N``; return the checkpoint's record.

    The model that the run began with, and its base, must lie where the run's recipe names them.

    Raises:
        UserError: the checkpoint is incomplete or damaged, the model that the run began with is not there or is another
            now, or ``output`` cannot be made.
    """
    try:
        record = verified_record(checkpoint)
    except UserError as error:
        raise UserError(f"{checkpoint} is no complete checkpoint: {error}") from error
    place = checkpoint.resolve().parent.parent / RUN_RECORD
    run = RunRecord.read(place)
    config = read_options(TrainConfig, [(str(place), *item) for item in without_gone_keys(run.config).items()])
    if dtype := run.config.get("save_dtype"):
        say_aside(f"{place}: the key save_dtype={dtype} is gone: {GONE['save_dtype'][1]}")
    check_output_folder(output, overwrite, [config.model, checkpoint])
    if mark_model(config) != run.model:
        raise UserError(f"model={config.model} is not what the run in {place.parent} began with; restore it")
    starting_point = replace(find_starting_point(config, run.reference and run.reference.kind), mixture=run.mixture)
    tokenizer = networks.load_tokenizer(Path(config.model))
    with lock_folder(output):
        check_output_folder(output, overwrite)  # another writer may have ended meanwhile
        networks.save_network(config, checkpoint, tokenizer, output, starting_point, record.step)
    return record
