"""``moh-llm convert``: a LLaMA checkpoint in, a MoH checkpoint with its proof out; and the way back."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from moh_llm.flags import OptionParser, options_from
from moh_llm.terminal import say

if TYPE_CHECKING:
    from moh_llm.conversion.config import ConversionConfig
    from moh_llm.records.conversion import Conversion, Verification


def add_arguments(parser: OptionParser) -> None:
    from moh_llm.conversion.config import ConversionConfig

    parser.usage = (
        "%(prog)s [-h] BASE --output-dir DIR [--OPTION VALUE ...]\n       %(prog)s RECIPE.yaml [--OPTION VALUE ...]"
    )
    parser.add_words("BASE", ConversionConfig, "base")
    parser.add_options(ConversionConfig, hidden=["base", *ConversionConfig.WITHOUT_FLAG])
    parser.add_argument("--to-dense", action="store_true", help="Write the plain checkpoint inside the MoH model BASE")


def run(args: argparse.Namespace) -> None:
    """Convert, and print what was done."""
    import moh_llm
    from moh_llm.conversion.config import ConversionConfig

    config = options_from(ConversionConfig, args, "base")
    if args.to_dense:
        restore(config)  # the way back: the dense checkpoint inside an MoH model
    else:
        print_conversion(moh_llm.convert(**vars(config)), config.output_dir)


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
    """Print what the model reads, and how close it is to its base: at most 15 lines of a terminal of 80 columns."""
    if record.images:
        from moh_llm.conversion.images import describe

        say(*describe(record, output), f"{record.seconds:.1f} s on {record.device}; written to {output}")
        return
    from moh_llm.claims import planned_heads
    from moh_llm.conversion.convert import LONG_CONTEXT
    from moh_llm.modeling import MoHLlamaConfig

    config = MoHLlamaConfig.from_pretrained(output)
    heads, plan = config.num_attention_heads, record.plan
    say(
        f"{record.base.label}: {config.num_hidden_layers} layers of {heads} heads",
        f"planned: {planned_heads(config.active_heads_per_layer, heads, config.all_heads_until)}",
        f"  reads {plan.keys_read:.1%} of the base's keys in {plan.context:,} tokens",
    )
    if added := record.vocabulary:
        say(f"{added.new_tokens} new tokens")
    if record.calibration:
        say(f"fitted to {record.calibration.tokens:,} tokens of {len(record.calibration.tokens_of_source)} sources")
    if record.verification:
        _print_proof(record.verification, heads)
    else:
        say("nothing was verified (--heldout-tokens 0)")
    routers = "smollm2_long" if plan.context >= LONG_CONTEXT else "routers"  # long sequences: fewer of them
    recipe = routers if config.router_type == "threshold" else "smollm2_recovery"
    further = f"next: moh-llm train recipes/{recipe}.yaml --model {shlex.quote(str(output))} "
    further += f"--data.sequence_length {plan.context}"
    if min(config.active_heads_per_layer) == heads:
        further = "every head is on, as in the base; ask for fewer (--keys, --num-active-heads)"
    say(f"{record.seconds:.1f} s on {record.device}, in {record.compute_dtype}; written to {output}", further)


def _print_proof(proof: "Verification", heads: int) -> None:
    from moh_llm.intervals import show_documents, show_figure

    own = proof.converted
    keys = "" if proof.keys_read is None else f", reads {proof.keys_read:.1%} of the base's keys"
    say(
        f"all heads on: every layer equals the base's, bit for bit ({proof.dtype})",
        f"on {proof.held_out_tokens:,} held-out tokens of {show_documents(proof.held_out_documents)} (95 % intervals):",
        f"  {proof.heads_read:.4g} of {heads} heads on{keys}",
        f"  perplexity {own.perplexity:.2f}, the base's {proof.base_perplexity:.2f}: "
        f"x {show_figure(own.perplexity_ratio, own.ratio_interval, '.3f')}",
        f"  KL to the base {show_figure(own.kl, own.kl_interval, '.4f')}, same top-1 token {own.top1_agreement:.1%}",
    )
    if parts := [f"{part.start:,}: {part.kl:.4f}" for part in proof.by_position]:
        say(f"  KL from token {', '.join(parts)}")
    if nats := [f"{found.task} {found.nats:+.2f}" for found in proof.retrieval if found.nats is not None]:
        say(f"  retrieval, nats over the base's: {', '.join(nats)}")
