"""``moh-llm convert``: a LLaMA checkpoint in, a MoH checkpoint with its proof out; and the way back."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moh_llm.commands.recipe_flags import RecipeOption, RemovedOption
from moh_llm.terminal import console, say

if TYPE_CHECKING:
    from moh_llm.records.conversion import Conversion, Verification

REMOVED = {
    "--attention-time": "state the budget as a share of the keys that are read, with --keys",
    "--new-embeddings": "a new token's row is the mean of the rows of its pieces in the base's tokenizer",
    "--pad-to-multiple-of": "the rows of the embedding are always rounded up to a multiple of 64",
    "--active-ratio": "--keys takes a share of the keys that are read, --num-active-heads a number of heads",
    "--verify": "--heldout-tokens says how much text is verified, 0 for none",
    "--revision": "BASE@REVISION names a revision on the Hub",
    "--link": "the base's weights are always copied",
    "--push-to-hub": "moh-llm publish FOLDER --repo-id ORG/NAME publishes what was converted",
    "--licence": "moh-llm publish FOLDER --repo-id ORG/NAME takes --licence",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("base", metavar="BASE", help="folder or Hub id[@REVISION] of a checkpoint, dense or MoH")
    parser.add_argument("--output", required=True, type=Path, help="folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")
    parser.add_argument("--to-dense", action="store_true", help="write the plain checkpoint inside the MoH model BASE")

    heads = parser.add_argument_group("head plan")
    heads.add_argument("--preset", choices=["paper"], help="the paper's layer: half shared, 3/4 active, query norm")
    heads.add_argument("--num-shared-heads", type=int, metavar="N", help="always-on heads (default: 1/8, at least 1)")
    heads.add_argument("--num-active-heads", type=int, metavar="N", help="mean heads per token (default: 3/4 of them)")
    heads.add_argument("--keys", type=float, metavar="X", help="the same as a share of the keys read at the context")
    heads.add_argument(
        "--router",
        choices=["linear", "threshold", "query_norm", "none"],
        help="how tokens choose (default: linear; with local fallbacks: threshold; none: the same heads for all)",
    )
    heads.add_argument(
        "--routing-granularity",
        choices=["head", "kv_group"],
        help="what is on or off as one: a head (default), or the heads that share keys and values",
    )
    heads.add_argument(
        "--fallback",
        choices=["value", "local", "none"],
        help="what replaces a head that is off (default: local at 2,048 tokens of context or more, else value)",
    )
    heads.add_argument(
        "--local-window",
        type=int,
        metavar="N",
        help="last tokens that a local fallback sees (default: 256; below 2,048 tokens of context 1/16 of it)",
    )
    heads.add_argument(
        "--local-start",
        type=int,
        metavar="N",
        help="first tokens of a document that have all heads on (default: 1/8 of the context, 1,024 at most)",
    )

    text = parser.add_argument_group("calibration and proof")
    text.add_argument(
        "--calibration",
        nargs="+",
        metavar="TEXT",
        help="text files (.jsonl, .json.gz, .jsonl.zst, .txt; equal shares) or one mixture (.yaml); "
        "default: what Python itself ships. A held-out part of it serves to verify",
    )
    text.add_argument(
        "--context", type=int, default=8192, metavar="N", help="tokens in a sequence, or the base's (default: 8192)"
    )
    text.add_argument("--calibration-tokens", type=int, default=24576, metavar="N", help="tokens to fit on")
    text.add_argument(
        "--heldout-tokens",
        type=int,
        metavar="N",
        help="tokens to verify on, the first of each held-out document; 0: no proof (default: those of 64 documents)",
    )

    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="a tokenizer with the base's tokens and new ones: folder or Hub id"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="of the written weights (default: the base's own)"
    )
    parser.add_argument(
        "--compute-dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="dtype that the base is run in (default: bfloat16 where this device computes it fast, else float32)",
    )
    parser.add_argument("--shared", action=RecipeOption, choices=["first", "importance"])
    parser.add_argument("--budgets", action=RecipeOption, choices=["uneven", "even"])
    parser.add_argument("--local-sinks", action=RecipeOption, type=int)
    for flag, instead in REMOVED.items():
        parser.add_argument(flag, action=RemovedOption, instead=instead)


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done."""
    import moh_llm

    if args.to_dense:
        return restore(args)  # the way back: the dense checkpoint inside an MoH model
    print_conversion(moh_llm.convert(**conversion_arguments(args)), args.output)
    return 0


def conversion_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `moh_llm.convert`: all flags but those of the other jobs of this command."""
    others = {"command", "run", "main", "command_line", "to_dense"}
    return {name: value for name, value in vars(args).items() if name not in others}


def restore(args: argparse.Namespace) -> int:
    """Do what ``--to-dense`` asks for. Raises UserError for flags that have no meaning with it."""
    import moh_llm
    from moh_llm.errors import UserError

    counts = ("num_shared_heads", "num_active_heads", "keys")
    plan = ("preset", *counts, "router", "routing_granularity", "budgets", "fallback")
    for flag in (*plan, "tokenizer", "dtype"):
        if getattr(args, flag, None) is not None:
            raise UserError(f"--to-dense copies the dense weights as they are; drop --{flag.replace('_', '-')}")
    restored = moh_llm.to_dense(args.base, args.output, overwrite=args.overwrite)
    say(
        f"{args.base}: {restored.dropped_tensors} routing tensors dropped, the dense model's byte for byte; "
        f"a {restored.model_type} model in {args.output}, {restored.seconds:.1f} s"
    )
    return 0


def print_conversion(record: "Conversion", output: Path) -> None:
    """Print the head plan, the cost and the verification."""
    from moh_llm.claims.conversion import calibration_text, conversion_took, parameters_added
    from moh_llm.claims.heads import heads_read

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
    claims = (calibration_text(record), heads_read(record.verification, heads))
    for claim in claims:
        if claim is not None:
            say(claim.text)
    cost = record.arithmetic
    ratios = [f"{flops.ratio:.3f} at {int(length):,}" for length, flops in cost.forward_flops.items()]
    say(f"parameters: {parameters_added(cost.parameters).text}")
    say(f"FLOPs over the base's, in theory, with as many heads on as the plan asks for: {', '.join(ratios)} tokens")
    if record.verification:
        _print_proof(record.verification)
    else:
        say("nothing was verified (--heldout-tokens 0)")
    say(f"written to {output} in {conversion_took(record).text}; its record:", output / "conversion.json")


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
