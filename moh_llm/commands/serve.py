"""``moh-llm serve MODEL``: transformers' own server, an OpenAI-compatible one, for MoH models.

``transformers serve`` looks a model's class up among those of transformers, and so knows no class of another package.
"""

import argparse
import sys

from moh_llm.errors import UserError
from moh_llm.reading import expand_home


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [-h] MODEL [FLAGS OF transformers serve]"
    parser.add_argument("model", metavar="MODEL", type=expand_home, help="folder or Hub id of an MoH model")
    parser.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        help="for example --port 8000 or --continuous-batching; transformers serve --help lists them",
    )


def run(args: argparse.Namespace) -> None:
    """Serve until interrupted. Raises `UserError` where there is no such model, or packages are missing."""
    from transformers.utils.import_utils import is_serve_available

    from moh_llm.evaluation.models import check_model
    from moh_llm.modeling import MoHLlamaForCausalLM

    if not is_serve_available():
        raise UserError('serving needs packages that are not installed: pip install "transformers[serving]"')
    check_model(args.model)
    from transformers.cli.transformers import app

    # Where the server looks the class up. By name: the package puts another module in its own place.
    setattr(sys.modules["transformers"], MoHLlamaForCausalLM.__name__, MoHLlamaForCausalLM)
    app(["serve", args.model, *args.flags], prog_name="transformers")
