"""``moh-llm doctor RECIPE --key value ...``: check a training job before it is started."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moh_llm.errors import UserError
from moh_llm.terminal import say
from moh_llm.training.config import TrainConfig
from moh_llm.training.recipe import load_config

if TYPE_CHECKING:
    from moh_llm.training.preflight import Diagnosis
    from moh_llm.training.preflight_data import Finding

STRATEGIES = ("one", "ddp", "zero1", "zero2", "zero3", "fsdp2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [-h] RECIPE [--strategy NAME] [--processes N] [--gpu NAME] [--json FILE] [--KEY VALUE ...]"
    parser.description = (
        "Check a training job before it is started: versions, devices, model, data, output, disk, memory, Hub;\n"
        "and say what it amounts to in steps, tokens, FLOPs and days. Status 1: something would stop or spoil the job."
    )
    parser.epilog = "--KEY VALUE overrides a key of the recipe, as for moh-llm train, whose --help lists them."
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, for example recipes/smollm2_recovery.yaml")
    _add_flags(parser)
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(print_help=parser.print_help, strategy="one", processes=1, gpu=None, json=None)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    # Without defaults, since they are read twice: before the recipe and among what follows it.
    add, none = parser.add_argument, argparse.SUPPRESS
    add("--strategy", choices=STRATEGIES, default=none, help="how processes share the work (default: one process)")
    add("--processes", type=_number, default=none, metavar="N", help="processes, that is GPUs (default: 1)")
    add("--gpu", default=none, metavar="NAME", help="GPU of each, for example H100 (default: what is here)")
    add("--json", default=none, metavar="FILE", help="also write the findings as JSON")


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def run(args: argparse.Namespace) -> int:
    """Check and print. Returns 1 if there is a fault, else 0; raises `UserError` for bad input."""
    flags = argparse.ArgumentParser(prog="moh-llm doctor", usage="see --help", add_help=False, allow_abbrev=False)
    _add_flags(flags)
    args, overrides = flags.parse_known_args(args.overrides, args)
    if {"-h", "--help"} & set(overrides):
        args.print_help()
        return 0
    config = load_config(args.recipe, overrides)

    import os
    from pathlib import Path

    from moh_llm.files import write_json
    from moh_llm.training.preflight import diagnose

    diagnosis = diagnose(config, args.strategy, args.processes, args.gpu)
    diagnosis.findings.extend(_check_hub(config))
    for line in describe(diagnosis):
        say(line)
    if args.json is not None:
        given = {"recipe": args.recipe, "strategy": args.strategy, "processes": args.processes, "gpu": args.gpu}
        write_json(Path(os.path.realpath(args.json)), given | diagnosis.record())
    return 0 if diagnosis.fit else 1


def _check_hub(config: TrainConfig) -> Iterator["Finding"]:
    """Whether what the job makes can be published, as far as this machine knows."""
    from moh_llm.hub.pushes import check_hub
    from moh_llm.training.preflight_data import Finding

    if config.hub is None:
        return
    try:
        check_hub(config)
        yield Finding("ok", "hub", f"a token, a licence and a name that it allows for {config.hub.repo_id}")
    except UserError as error:
        yield Finding("fault", "hub", str(error))


def describe(diagnosis: "Diagnosis") -> list[str]:
    """The diagnosis as lines of text: findings, memory, plan."""
    lines = [f"{state:7}  {check:9}  {text}" for state, check, text in diagnosis.findings]
    if memory := diagnosis.memory:
        lines += ["", "memory of each process, estimated, in GiB"]
        lines += [f"  {name:12}{size / 2**30:9.2f}" for name, size in memory.parts.items()]
        lines[-1] += f"  at {memory.moment}"
        lines.append(f"  {'total':12}{memory.total / 2**30:9.2f}")
    if plan := diagnosis.plan:
        days = "not known" if plan.days is None else f"{plan.days:.3g}"
        lines += ["", "plan", f"  steps   {plan.steps:,}", f"  tokens  {plan.tokens:,}", f"  FLOPs   {plan.flops:.3g}"]
        lines.append(f"  days    {days}  ({plan.assumes})")
    return lines
