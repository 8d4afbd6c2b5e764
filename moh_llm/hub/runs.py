"""Publishing the model of a training run: checks before the run begins, and the upload at its end."""

import shlex
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.hub import card
from moh_llm.hub.checks import CARD
from moh_llm.hub.config import PublishConfig
from moh_llm.hub.lineage import Lineage, check_terms, find_licence, read_lineage
from moh_llm.hub.publish import check_repo_id, find_token, publish
from moh_llm.records.model import is_moh, read_config, read_moh_config
from moh_llm.terminal import say
from moh_llm.training.config import TrainConfig
from moh_llm.training.runs import check_converted


def check_hub(config: TrainConfig) -> None:
    """Raise UserError for what would prevent publishing the run's model; the Hub is not contacted."""
    if config.hub is None:
        return
    start = Path(config.model)
    (check_converted if config.images is None else read_moh_config)(start)
    try:
        check_repo_id(config.hub.repo_id)
        find_token()
        # The tuned model inherits the conversion's record, not that of an earlier run.
        licence = find_licence(Lineage(start, read_lineage(start).conversion, None))
        check_terms(licence, config.hub.repo_id, start)
    except UserError as error:
        way_out = "leave out hub, and publish the tuned model by moh-llm publish --licence ID"
        message = str(error).replace("pass --licence ID", way_out).replace("--repo-id", "--hub.repo_id")
        raise UserError(message) from error


def finish_run(config: TrainConfig) -> None:
    """Write the card of a finished run's model, unless it has one, and publish the model if the recipe says so.

    Dense models, which runs on images may train, have no card. A card that cannot be written is printed. Raises
    UserError, with the command that tries again, for a model that cannot be published.
    """
    model = Path(config.output_dir) / "model"
    if is_moh(read_config(model)) and not (model / CARD).exists():
        try:
            card.write_local_card(model)
        except UserError as error:
            say(f"{model / CARD} was not written: {error}")
    if config.hub is None:
        return
    try:
        publish(PublishConfig(model, config.hub.repo_id))
    except UserError as error:
        words = ["moh-llm", "publish", str(model), "--repo-id", config.hub.repo_id]
        raise UserError(
            f"training is finished, its model is {model}; publishing it failed: {error}; try again with "
            f"`{shlex.join(words)}`, or give the same command again"
        ) from error
