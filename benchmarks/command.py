"""How the commands of this folder end: with 0, or with 1 and a line that says what is wrong."""

import argparse
import sys
from collections.abc import Callable

from moh_llm.errors import UserError


def status_of(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """The exit status of `run(args)`; its `UserError` is printed."""
    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
