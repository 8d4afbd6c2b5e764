"""``moh-llm COMMAND``: dispatch to the commands; heavy imports happen when a command runs."""

import errno
import importlib
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from moh_llm import __version__
from moh_llm.errors import UserError, without_passwords
from moh_llm.flags import OptionParser
from moh_llm.terminal import say_aside

COMMANDS = {
    "quickstart": "convert, tune and score a small real model in one go",
    "recipes": "list the recipes and data mixtures of this package, and copy them",
    "convert": "turn a LLaMA checkpoint into a Mixture-of-Head one, with proof",
    "mixture": "show a data mixture: shares, tokens, epochs for a budget",
    "tokenize": "turn a data mixture into token shards, once, for long or many runs",
    "init": "make a model of random weights from an architecture file, to train from scratch",
    "train": "tune a converted model to recover the base's quality",
    "checkpoint": "make a model of a checkpoint of a training run",
    "doctor": "check a training job before it is started, and say what it will take",
    "report": "write the page of a training run, finished or not: curves and tables",
    "data": "fetch the benchmarks of a suite, to evaluate without a network",
    "evaluate": "score a model and its base on benchmarks and write a report",
    "inspect": "draw which heads of a model are on for the tokens of a text",
    "serve": "serve a model with transformers' OpenAI-compatible server",
    "publish": "check a model, prove that it loads anywhere, and upload it with its card",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, given its name and arguments (default: those of the program).

    Returns:
        The exit status: 0, 1 for a job whose result is a failure, 2 for bad input (one line on stderr), 130 when
        interrupted.
    """
    if argv is None:  # as a program
        sys.excepthook = _print_traceback
        for stream in (sys.stdout, sys.stderr):  # characters that a terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    argv = sys.argv[1:] if argv is None else argv
    parser = OptionParser(prog="moh-llm", description="Turn a pretrained LLM into a Mixture-of-Head model.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in argv[:1]:  # importing what the others need would take time
            module = importlib.import_module(f"moh_llm.commands.{name}")
            command.description = module.__doc__
            command.set_defaults(run=module.run, main=main)
            module.add_arguments(command)
    # Progress of our own steps is shown; the libraries' bars for loading weights only add noise.
    if "publish" not in argv[:1]:  # an upload is the library's own step
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_LEAVE", "")  # a bar that is full goes
    if not sys.stderr.isatty():  # all bars, those of libraries too: none of short work, and the others every 10 s
        os.environ.setdefault("TQDM_MININTERVAL", "10")
        os.environ.setdefault("TQDM_DELAY", "10")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        # transformers imports DeepSpeed wherever it is installed, and DeepSpeed then tells which device it found.
        logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        args = parser.parse_args(argv)
        args.command_line = without_passwords(shlex.join(["moh-llm", *argv]))  # for the records that a command writes
        return args.run(args) or 0  # None: all went well
    except UserError as error:
        say_aside(f"error: {error}")
        return 2
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        say_aside(f"error: {str(error.filename)[:60]}...: the name is too long for a file")
        return 2
    except KeyboardInterrupt:
        say_aside("interrupted; nothing half-written was left in place of a result")
        return 130


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without passwords."""
    sys.stderr.write(without_passwords("".join(traceback.format_exception(kind, error, trace))))


if __name__ == "__main__":
    sys.exit(main())
