"""``moh-llm publish DIR --repo-id ORG/NAME``: check a model, load it in a clean process, upload it with its card."""

import argparse

from moh_llm.flags import OptionParser, options_from


def add_arguments(parser: OptionParser) -> None:
    from moh_llm.hub.config import PublishConfig

    parser.usage = "%(prog)s [-h] DIR --repo-id ORG/NAME [--OPTION VALUE ...]\n       %(prog)s RECIPE.yaml ..."
    parser.add_words("DIR", PublishConfig, "folder")
    parser.add_options(PublishConfig, hidden=["folder"])


def run(args: argparse.Namespace) -> None:
    """Publish the folder. Raises UserError where something keeps it from that."""
    from moh_llm.hub.config import PublishConfig
    from moh_llm.hub.publish import publish

    publish(options_from(PublishConfig, args, "folder"))
