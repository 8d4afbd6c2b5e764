"""``moh-llm convert``: a LLaMA checkpoint in, a MoH checkpoint with its proof out; and the way back."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from moh_llm.flags import OptionParser, options_from
from moh_llm.terminal import say

if TYPE_CHECKING:
    from moh_llm.conversion.config import ConversionConfig
    from moh_llm.records.conversion import Conversion, Verification


def add_arguments(parser: OptionParser) -> None:
    """Declare the command's arguments."""
    from moh_llm.conversion.config import ConversionConfig

    parser.usage = (
        "%(prog)s [-h] BASE --output-dir DIR [--OPTION VALUE ...]\n       %(prog)s RECIPE.yaml [--OPTION VALUE ...]"
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
        print_conversion(moh_llm.convert(**vars(config)), config.output_dir)
    return 0


def restore(config: "ConversionConfig") -> None:
    """Do what ``--to-dense`` asks for. Raises UserError for options that have no meaning with it."""
    import moh_llm
    from moh_llm.errors import UserError
    from moh_llm.recipe import differing

    if others := differing(config).keys() - {"base", "output_dir", "overwrite"}:
        raise UserError(f"--to-dense copies the dense weights as they are; drop {', '.join(sorted(others))}")
    moh_llm.to_dense(config.base, config.output_dir, overwrite=config.overwrite)
    say(f"{config.base}: the dense model inside, byte for byte, is written to {config.output_dir}")


def print_conversion(record: "Conversion", output: Path) -> None:
    """Print the head plan, the cost and the verification."""
    if record.images:
        from moh_llm.vision.convert import describe

        say(*describe(record, output), f"{record.seconds:.1f} s on {record.device}; written to {output}")
        return
    from moh_llm.claims import calibration_text, heads_read, parameters_added
    from moh_llm.modeling import MoHLlamaConfig

    config = MoHLlamaConfig.from_pretrained(output)
    heads, active = config.num_attention_heads, config.active_heads_per_layer
    say(
        f"{record.base.name}: {len(active)} layers of {heads} heads -> {sum(active) / len(active):.4g} asked for, "
        f"which read {record.plan.keys_read:.1%} of the base's keys at {record.plan.context:,} tokens",
        f"router {config.router_type}, fallback {config.head_fallback}",
        f"heads asked for by layer: {' '.join(map(str, active))}",
        f"shared heads by layer: {' '.join(str(len(shared)) for shared in config.shared_heads_per_layer)}",
    )
    if added := record.vocabulary:
        say(f"{added.new_tokens} new tokens")
    if config.head_fallback == "local":
        say(f"a document's first {config.all_heads_until:,} tokens have all heads on")
    say(calibration_text(record))
    if read := heads_read(record.verification, heads):
        say(read)
    say(f"parameters: {parameters_added(record.parameters)}")
    if record.verification:
        _print_proof(record.verification)
    else:
        say("nothing was verified (--heldout-tokens 0)")
    say(f"{record.seconds:.1f} s on {record.device}, in {record.compute_dtype}; written to {output}")


def _print_proof(proof: "Verification") -> None:
    from moh_llm.intervals import show_documents, show_figure

    own = proof.converted
    say(
        f"all heads on: every layer equals the base's, bit for bit ({proof.dtype})",
        f"as planned, on {proof.held_out_tokens:,} held-out tokens of {show_documents(proof.held_out_documents)}, with "
        "95 % intervals:",
        f"  perplexity {own.perplexity:.2f}, the base's {proof.base_perplexity:.2f}: "
        f"x {show_figure(own.perplexity_ratio, own.ratio_interval, '.3f')}",
        f"  KL to the base {show_figure(own.kl, own.kl_interval, '.4f')}, same top-1 token {own.top1_agreement:.1%}",
    )
    for part in proof.by_position:
        say(f"  from position {part.start:,} of a document on: KL {part.kl:.4f} ({part.tokens:,} tokens)")
    for found in proof.retrieval:
        say(f"  {found.task} of what is out of sight: {found.converted} of {found.asked} right, the base {found.base}")
