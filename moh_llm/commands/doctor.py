"""``moh-llm doctor RECIPE --option value ...``: check a training job before it is started.

It checks devices, model, data, output, disk, memory and Hub, and prints the job's steps, tokens, FLOPs and
days. Status 1: something would stop or spoil the job.
"""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moh_llm.errors import UserError
from moh_llm.flags import OptionParser, as_path
from moh_llm.terminal import say

if TYPE_CHECKING:
    from moh_llm.training.config import TrainConfig
    from moh_llm.training.preflight import Diagnosis
    from moh_llm.training.preflight_inputs import Finding

STRATEGIES = ("one", "ddp", "zero1", "zero2", "zero3", "fsdp2")


def add_arguments(parser: OptionParser) -> None:
    """Declare the command's arguments."""
    from moh_llm.training.config import TrainConfig

    add = parser.add_argument
    parser.usage = (
        "%(prog)s [-h] RECIPE [--strategy NAME] [--processes N] [--gpu NAME] [--json FILE] [--OPTION VALUE ...]"
    )
    parser.epilog = "The other options are those of moh-llm train, whose --help lists them."
    add("recipe", metavar="RECIPE", help="YAML file, for example recipes/smollm2_recovery.yaml")
    add("--strategy", choices=STRATEGIES, default="one", help="how processes share the work (default: one process)")
    add("--processes", type=_count, default=1, metavar="N", help="processes, that is GPUs (default: 1)")
    add("--gpu", metavar="NAME", help="GPU of each, for example H100 (default: what is here)")
    add("--json", metavar="FILE", type=as_path, help="also write the findings as JSON")
    parser.add_options(TrainConfig, joint="_", described=False)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Check and print. Returns 1 if there is a fault, else 0; raises `UserError` for bad input."""
    from moh_llm.files import write_json
    from moh_llm.recipe import read_options, recipe_values
    from moh_llm.training.config import TrainConfig
    from moh_llm.training.preflight import diagnose

    config = read_options(TrainConfig, [*recipe_values(args.recipe), *args.given])
    diagnosis = diagnose(config, args.strategy, args.processes, args.gpu)
    diagnosis.findings.extend(_check_hub(config))
    for line in describe(diagnosis):
        say(line)
    if args.json is not None:
        given = {"recipe": args.recipe, "strategy": args.strategy, "processes": args.processes, "gpu": args.gpu}
        write_json(args.json.resolve(), given | diagnosis.record())
    return 0 if diagnosis.fit else 1


def _check_hub(config: "TrainConfig") -> Iterator["Finding"]:
    """Whether what the job makes can be published, as far as this machine knows."""
    from moh_llm.hub.pushes import check_hub
    from moh_llm.training.preflight_inputs import Finding

    if config.hub is None:
        return
    try:
        check_hub(config)
        yield Finding("ok", "hub", f"a token, a licence and a name that it allows for {config.hub.repo_id}")
    except UserError as error:
        yield Finding("fault", "hub", str(error))


def describe(diagnosis: "Diagnosis") -> list[str]:
    """The diagnosis as lines of text: findings, memory, plan."""
    lines = [f"{n:<2} {state:7}  {check:9}  {text}" for n, (state, check, text) in enumerate(diagnosis.findings, 1)]
    if memory := diagnosis.memory:
        lines += ["", "memory of each process, estimated, in GiB"]
        lines += [f"  {name:12}{size / 2**30:9.2f}" for name, size in vars(memory).items()]
        lines.append(f"  {'total':12}{memory.total / 2**30:9.2f}")
    if plan := diagnosis.plan:
        days = "not known" if plan.days is None else f"{plan.days:.3g}"
        lines += ["", "plan", f"  steps   {plan.steps:,}", f"  tokens  {plan.tokens:,}", f"  FLOPs   {plan.flops:.3g}"]
        lines.append(f"  days    {days}  ({plan.assumes})")
    return lines
