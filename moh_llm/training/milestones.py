"""The models of a run's milestones, each in a folder that reads as a run which ended there.

    OUTPUT/milestones/step-000100/model/     the model after 100 steps, to be used like any other
                                  run.json   the run's record, as far as it had come
                                  log.jsonl  its log up to that step

So a card or a report says of a milestone what held then, whatever the run came to afterwards.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from moh_llm.files import new_folder, write_json
from moh_llm.records.run import CheckpointRecord
from moh_llm.training import networks
from moh_llm.training.beginning import Beginning
from moh_llm.training.checkpoints import RECORD
from moh_llm.training.config import TrainConfig
from moh_llm.training.parallel import loading_whole
from moh_llm.training.runs import Run


def saved_milestones(run: Run) -> list[Path]:
    """The folders of the milestones that a run has saved so far, in the order of their steps."""
    return sorted(run.milestones.glob("step-*"))


def keep_milestone(
    config: TrainConfig,
    run: Run,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    beginning: Beginning,
    on_milestone: Callable[[Path], None],
    step: int,
    checkpoint: Path,
) -> None:
    """Save the model of a checkpoint, if the recipe asks for it, and call ``on_milestone`` with its folder.

    The main process does it alone, since the weights lie whole in the checkpoint; the others wait in their next step.

    Args:
        config, run, accelerator, tokenizer, beginning: of the run, whose log ends with that step.
        on_milestone: see `moh_llm.training.loop.train`.
        step: how many steps were made.
        checkpoint: the folder of the checkpoint after them.

    Raises:
        UserError: the disk refuses, or ``config.model`` can no longer be read.
    """
    asked = config.hub is not None and config.hub.milestones and step % config.checkpoint.milestone_every == 0
    if not (asked and accelerator.is_main_process):
        return
    state = CheckpointRecord.read(checkpoint / RECORD)
    facts = {"steps": step, "tokens": step * config.tokens_per_step, "seconds": state.seconds}
    folder = run.milestones / checkpoint.name
    with new_folder(folder, overwrite=True) as temporary:
        with loading_whole(accelerator):
            weights = load_file(checkpoint / "model.safetensors")
            networks.save_network(config, weights, tokenizer, temporary / "model", beginning, step)
        write_json(temporary / "run.json", run.record | facts | {"data_read": state.data})
        shutil.copyfile(run.folder / "log.jsonl", temporary / "log.jsonl")
    on_milestone(folder)
