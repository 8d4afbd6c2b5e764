"""``moh-llm convert``: a LLaMA checkpoint in, a MoH checkpoint with its proof out; and the way back."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from moh_llm.flags import OptionParser, options_from
from moh_llm.terminal import console, say

if TYPE_CHECKING:
    from moh_llm.conversion.config import ConversionConfig
    from moh_llm.records.conversion import Conversion, Verification


def add_arguments(parser: OptionParser) -> None:
    """Declare the command's arguments."""
    from moh_llm.conversion.config import ConversionConfig

    parser.usage = (
        "%(prog)s [-h] BASE --output DIR [--OPTION VALUE ...]\n       %(prog)s RECIPE.yaml [--OPTION VALUE ...]"
    )
    parser.add_words("BASE", ConversionConfig, "base")
    parser.add_options(ConversionConfig, hidden=["base", *ConversionConfig.WITHOUT_FLAG])
    parser.add_argument("--to-dense", action="store_true", help="Write the plain checkpoint inside the MoH model BASE")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done."""
    import moh_llm
    from moh_llm.conversion.config import ConversionConfig

    config = options_from(ConversionConfig, args, "base")
    if args.to_dense:
        restore(config)  # the way back: the dense checkpoint inside an MoH model
    else:
        print_conversion(moh_llm.convert(**vars(config)), config.output)
    return 0


def restore(config: "ConversionConfig") -> None:
    """Do what ``--to-dense`` asks for. Raises UserError for options that have no meaning with it."""
    import moh_llm
    from moh_llm.errors import UserError
    from moh_llm.recipe import differing

    if others := differing(config).keys() - {"base", "output", "overwrite"}:
        raise UserError(f"--to-dense copies the dense weights as they are; drop {', '.join(sorted(others))}")
    restored = moh_llm.to_dense(config.base, config.output, overwrite=config.overwrite)
    say(
        f"{config.base}: {restored.dropped_tensors} routing tensors dropped, the dense model's byte for byte; "
        f"a {restored.model_type} model in {config.output}, {restored.seconds:.1f} s"
    )


def print_conversion(record: "Conversion", output: Path) -> None:
    """Print the head plan, the cost and the verification."""
    from moh_llm.claims import calibration_text, conversion_took, heads_read, parameters_added

    plan = record.plan
    heads, asked = plan.num_attention_heads, sum(plan.active_heads) / len(plan.active_heads)
    shared = [len(layer) for layer in plan.shared_heads]
    of_layers = f"{shared[0]} shared" if len(set(shared)) == 1 else f"shared by layer: {' '.join(map(str, shared))}"
    say(
        f"{record.base.name}: {len(plan.active_heads)} layers of {heads} heads -> {asked:.4g} asked for, "
        f"{of_layers} ({plan.shared})",
        f"router {plan.router_type}, fallback {plan.head_fallback}"
        + (", by whole key-value groups" if plan.routing_granularity == "kv_group" else ""),
    )
    if added := record.vocabulary:
        say(f"{added.new_tokens} new tokens: {added.base_rows} -> {added.rows} rows")
    if None not in (start := (plan.local_start, plan.local_window, plan.local_sinks)):
        say(f"a document's first {max(start[0], start[1] + start[2]):,} tokens have all heads on")
    if plan.budgets == "uneven":
        say(f"heads asked for by layer: {' '.join(map(str, plan.active_heads))}")
    say(calibration_text(record))
    if read := heads_read(record.verification, heads):
        say(read)
    cost = record.arithmetic
    ratios = [f"{flops.ratio:.3f} at {int(length):,}" for length, flops in cost.forward_flops.items()]
    say(f"parameters: {parameters_added(cost.parameters)}")
    say(f"FLOPs over the base's, in theory, with as many heads on as the plan asks for: {', '.join(ratios)} tokens")
    if record.verification:
        _print_proof(record.verification)
    else:
        say("nothing was verified (--heldout-tokens 0)")
    say(f"written to {output} in {conversion_took(record)}; its record:", output / "conversion.json")


def _print_proof(proof: "Verification") -> None:
    from rich.table import Table

    from moh_llm.intervals import show_documents, show_figure

    say(f"all heads on: every layer equals the base's, bit for bit ({proof.dtype})")
    documents = show_documents(proof.held_out_documents)
    table = Table(title=f"held-out text, {proof.held_out_tokens} tokens of {documents}")
    for column in ("model", "perplexity", "x base (95 %)", "KL to base (95 %)", "same top-1"):
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_row("base", f"{proof.base_perplexity:.2f}", "1.000", "0", "100.0 %")
    own = proof.converted
    table.add_row(
        "converted",
        f"{own.perplexity:.2f}",
        show_figure(own.perplexity_ratio, own.ratio_interval, ".3f", "\n"),
        show_figure(own.kl, own.kl_interval, ".4f", "\n"),
        f"{100 * own.top1_agreement:.1f} %",
    )
    console().print(table)
    for part in proof.by_position:
        say(
            f"converted, from position {part.start} of a document on: x {part.perplexity_ratio:.4f}, "
            f"KL {part.kl:.4f} ({part.tokens} tokens)"
        )
    for found in proof.retrieval:
        say(f"{found.task} of what is out of sight: {found.converted} of {found.asked} right, the base {found.base}")
