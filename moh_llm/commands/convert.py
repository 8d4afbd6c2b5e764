"""``moh-llm convert``: a LLaMA checkpoint in, a MoH checkpoint with its proof out; and the way back."""

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("base", metavar="BASE", help="folder or Hub id of a checkpoint (safetensors), dense or MoH")
    parser.add_argument("--output", required=True, type=Path, help="folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder if it is not empty")
    parser.add_argument("--to-dense", action="store_true", help="write the plain checkpoint inside the MoH model BASE")

    heads = parser.add_argument_group("head plan")
    heads.add_argument("--preset", choices=["paper"], help="the paper's layer: half shared, 3/4 active, query norm")
    heads.add_argument("--num-shared-heads", type=int, metavar="N", help="always-on heads (default: 1/8, at least 1)")
    heads.add_argument("--num-active-heads", type=int, metavar="N", help="mean heads per token, shared ones included")
    heads.add_argument("--active-ratio", type=float, metavar="X", help="the same as a share (default: 0.75)")
    heads.add_argument("--shared", choices=["first", "importance"], default="first", help="which heads are shared")
    heads.add_argument("--router", choices=["linear", "query_norm"], help="how tokens choose (default: linear)")
    heads.add_argument(
        "--routing-granularity",
        choices=["head", "kv_group"],
        help="what is on or off as one: a head (default), or the heads that share keys and values",
    )
    heads.add_argument(
        "--budgets", choices=["uneven", "even"], help="heads per layer: by what the layer loses (default), or equal"
    )
    heads.add_argument(
        "--fallback", choices=["value", "none"], help="what replaces a head that is off (default: value; paper: none)"
    )

    text = parser.add_argument_group("calibration and proof")
    text.add_argument(
        "--calibration",
        nargs="+",
        metavar="TEXT",
        help="text files (.jsonl, .json.gz, .jsonl.zst, .txt; equal shares) or one mixture (.yaml); "
        "default: what Python itself ships. A held-out part of it serves to verify",
    )
    text.add_argument("--calibration-tokens", type=int, default=24576, metavar="N", help="tokens to fit on")
    text.add_argument("--heldout-tokens", type=int, default=8192, metavar="N", help="held-out tokens to verify on")
    text.add_argument(
        "--verify", choices=["full", "quick", "none"], default="full", help="quick: on 2,048 tokens; none: no proof"
    )

    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: the base's own")
    parser.add_argument("--link", action="store_true", help="hard-link the base's weights rather than copy them")
    parser.add_argument("--revision", help="Hub revision of the base")
    parser.add_argument("--push-to-hub", metavar="ORG/NAME", help="then publish the model, as moh-llm publish does")
    parser.add_argument("--licence", metavar="ID", help="the Hub's id of its licence, to publish (default: the base's)")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done."""
    import torch

    from moh_llm.conversion.convert import ConversionOptions, convert, restore_dense
    from moh_llm.conversion.plan import PlanOptions
    from moh_llm.data.mixture import EMBEDDED, mixture_from_arguments
    from moh_llm.errors import UserError
    from moh_llm.hub.card import write_local_card
    from moh_llm.locking import lock_folder

    for flag in ("calibration_tokens", "heldout_tokens"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be at least 1")
    if args.dtype and args.link:
        raise UserError("--link keeps the base's bytes and --dtype changes them; drop one")
    if args.push_to_hub is not None:
        _check_push(args)
    elif args.licence is not None:
        raise UserError("--licence is for publishing; pass --push-to-hub ORG/NAME, too, or drop it")
    if args.to_dense:
        counts = ("num_shared_heads", "num_active_heads", "active_ratio")
        for flag in ("preset", *counts, "router", "routing_granularity", "budgets", "fallback", "dtype"):
            if getattr(args, flag) is not None:
                raise UserError(f"--to-dense copies the dense weights as they are; drop --{flag.replace('_', '-')}")
        restored = restore_dense(args.base, args.output, args.overwrite, args.link, args.revision)
        print(
            f"{args.base}: {restored['dropped_tensors']} routing tensors dropped, all others byte for byte; "
            f"a {restored['model_type']} model in {args.output}, {restored['seconds']:.1f} s"
        )
        return 0
    record = convert(
        ConversionOptions(
            base=args.base,
            output=args.output,
            plan=PlanOptions(
                preset=args.preset,
                num_shared_heads=args.num_shared_heads,
                num_active_heads=args.num_active_heads,
                active_ratio=args.active_ratio,
                router=args.router,
                shared=args.shared,
                budgets=args.budgets,
                fallback=args.fallback,
                routing_granularity=args.routing_granularity or "head",
            ),
            calibration=mixture_from_arguments(args.calibration) if args.calibration else EMBEDDED,
            calibration_tokens=args.calibration_tokens,
            heldout_tokens=args.heldout_tokens,
            verify=args.verify,
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            link=args.link,
            revision=args.revision,
            overwrite=args.overwrite,
        )
    )
    with lock_folder(args.output):
        write_local_card(args.output)
    _print_summary(record, args.output)
    if args.push_to_hub is not None:
        from moh_llm.hub.publish import PublishOptions, publish

        publish(PublishOptions(args.output, args.push_to_hub, licence=args.licence))
    return 0


def _check_push(args: argparse.Namespace) -> None:
    """Raise UserError for what would keep the converted model from being published, before it is converted."""
    from moh_llm.conversion.base import open_base
    from moh_llm.errors import UserError
    from moh_llm.hub.lineage import Lineage
    from moh_llm.hub.publish import check_publishable
    from moh_llm.records.conversion import Conversion

    if args.to_dense:
        raise UserError("--push-to-hub publishes MoH models, and --to-dense makes none; drop one")
    base = open_base(args.base, args.revision, args.preset == "paper")
    conversion = Conversion.of({"base": base.identity()}, args.base)
    check_publishable(args.push_to_hub, Lineage(base.folder, conversion, None), args.licence)


def _print_summary(record: dict[str, Any], output: Path) -> None:
    from rich.console import Console

    plan = record["plan"]
    heads, active = plan["num_attention_heads"], sum(plan["active_heads"]) / len(plan["active_heads"])
    shared = sum(map(len, plan["shared_heads"])) / len(plan["shared_heads"])
    console = Console()
    console.print(
        f"{record['base']['name']}: {len(plan['active_heads'])} layers of {heads} heads -> {active:.4g} active, "
        f"{shared:g} shared ({plan['shared']}), router {plan['router_type']}, fallback {plan['head_fallback']}"
        + (", by whole key-value groups" if plan["routing_granularity"] == "kv_group" else "")
    )
    if plan["budgets"] == "uneven":
        console.print(f"active heads by layer: {' '.join(map(str, plan['active_heads']))}")
    if calibration := record.get("calibration"):
        console.print(f"calibrated on {calibration['tokens']} tokens of {', '.join(calibration['sources'])}")
    cost = record["arithmetic"]
    ratios = ", ".join(f"{flops['ratio']:.3f} at {length}" for length, flops in cost["forward_flops"].items())
    added = cost["parameters"]["moh"] / cost["parameters"]["dense"] - 1
    console.print(f"{added:+.2%} parameters; in theory {ratios} tokens of the base's FLOPs")
    if "verification" in record:
        _print_proof(console, record["verification"])
    else:
        console.print("nothing was verified (--verify none)")
    console.print(
        f"written to {output} in {record['seconds']:.0f} s, {record['peak_memory_mib']} MiB at most; "
        f"the record is {output / 'conversion.json'}"
    )


def _print_proof(console: Any, proof: dict[str, Any]) -> None:
    from rich.table import Table

    from moh_llm.intervals import show_documents, show_figure

    console.print(f"all heads on: every layer equals the base's, bit for bit ({proof['dtype']})")
    documents = show_documents(proof["held_out_documents"])
    table = Table(title=f"held-out text, {proof['held_out_tokens']} tokens of {documents}")
    for column in ("model", "perplexity", "x base (95 %)", "KL to base (95 %)", "same top-1"):
        table.add_column(column, justify="left" if column == "model" else "right")
    table.add_row("base", f"{proof['base_perplexity']:.2f}", "1.000", "0", "100.0 %")
    even = f"{proof['paper_active_heads']} in each layer"
    names = {"converted": "converted", "paper_router": f"paper's layer, {even}", "random_heads": f"random, {even}"}
    for key, label in names.items():
        row = proof[key]
        table.add_row(
            label,
            f"{row['perplexity']:.2f}",
            show_figure(row["perplexity_ratio"], row["ratio_interval"], ".3f", "\n"),
            show_figure(row["kl"], row["kl_interval"], ".4f", "\n"),
            f"{100 * row['top1_agreement']:.1f} %",
        )
    console.print(table)
