"""From a YAML recipe and ``--option value`` overrides to a `TrainConfig`."""

from collections.abc import Sequence
from pathlib import Path

from moh_llm.flags import OptionParser
from moh_llm.recipe import read_options, recipe_values
from moh_llm.training.config import TrainConfig


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a recipe, lay overrides over it, and check every option.

    Args:
        recipe: path of the YAML file.
        overrides: ``["--max_steps", "20", "--optimizer.learning_rate=1e-4", ...]``.

    Raises:
        UserError: as `read_options`.
    """
    parser = OptionParser(add_help=False)
    parser.add_options(TrainConfig, joint="_")
    return read_options(TrainConfig, [*recipe_values(recipe), *parser.parse_args(overrides).given])
