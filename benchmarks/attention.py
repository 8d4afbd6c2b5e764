"""What attention costs with part of the heads, as ratios to dense attention in the same run.

    python benchmarks/attention.py --json attention.json           # on CUDA: LLaMA3-8B's layer, all tables
    python benchmarks/attention.py --tables layer --lengths 8192 --shares 75 50
    python benchmarks/attention.py --tables decode --batch 16 --hide-launches
    python benchmarks/attention.py --size tiny                     # on a CPU: does it run, and is it right

- layer: attention alone in the form of the paper's Tab. 7, forward, and forward with backward: the fastest dense SDPA
  backend, compiled FlexAttention, and our kernel with all and with part of the heads, drawn for each token. Beneath,
  what routing takes: the routers, and the lists of selected positions, which MoH's times include.
- decode: one new token per row over a cache, routed by whole groups of keys and values, and by heads.
- stack: prefill and decoding of a few decoder layers with random weights: dense, MoH masked and MoH head-sparse; the
  paper's layer, by heads and by groups, and the linear router with value and with local fallbacks.

Times are medians over rounds in which peers take turns; ratios are medians of those within a round, with the least and
the most. "error" is the norm of the difference from dense attention times the gate, relative to that, the largest of
the output or of the gradients; in stack it is the distance from masked MoH, close calls of the routers included.
"exact" computes heads that are off, too, for the gate's gradient. FLOPs are in theory, without what is computed again
going backward. Memory is the peak beyond the inputs. On a CPU our kernels are interpreted, and their times, which mean
nothing, left out.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import attention_peers as peers
import torch
from attention_decoding import Stack, decode_rows
from attention_peers import DEVICE, ON_CUDA, SIZES, Peer, Row, Shape

from moh_llm.devices import compute_dtype, name_device
from moh_llm.kernels import head_sparse_attention
from moh_llm.kernels.head_sparse_kernels import selected_positions, triton

# Behind attention_peers, which sets what Triton reads when it is imported.
from moh_llm.modeling import MoHLlamaConfig, MoHRouter

TABLES = ("layer", "decode", "stack")
DEFAULTS = {
    "llama3-8b": {"lengths": [256, 512, 2048, 8192, 32768], "contexts": [2048, 8192, 32768], "layers": 4},
    "tiny": {"lengths": [64, 128], "contexts": [128], "batch": [1], "layers": 2},
}
TOKENS, BATCHES = 32768, (1, 16, 64)  # of a pass of `layer`, and of the other tables
# Percent of the heads, and the most that attention of 8192 tokens with them may take, in dense attention's time.
ASKED = {"forward": {75: 0.80, 50: 0.55}, "with backward": {75: 0.85, 50: 0.60}}
# Columns: width, negative if text begins on the left, and digits.
FORMAT = {"tokens": (6, 0), "batch": (5, 0), "pass": (-13, 0), "path": (-27, 0), "share": (5, 0), "ms": (11, 3)}
FORMAT |= {"ratio": (6, 2), "least": (6, 2), "most": (6, 2), "gflop": (10, 3), "peak_mib": (8, 0), "gb_s": (7, 1)}
FORMAT |= {"tokens_s": (9, 0), "error": (7, 4)}
FORMAT |= {"of_attention": (12, 3)}


class Parser(argparse.ArgumentParser):
    """One line for a mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="not all of them")
    parser.add_argument("--size", choices=SIZES, help="of a layer; default: llama3-8b on CUDA, tiny on a CPU")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a row, for layer")
    parser.add_argument("--contexts", nargs="+", type=int, help="tokens in the cache, for decode and stack")
    parser.add_argument("--shares", nargs="+", type=int, default=[90, 75, 50], help="percent of the heads")
    parser.add_argument("--batch", nargs="+", type=int, help="rows; default: as many as make 32768 tokens; 1 16 64")
    parser.add_argument("--layers", type=int, help="of the stack; default: 4 (tiny: 2)")
    parser.add_argument("--rounds", type=int, default=20, help="of each cell, at most")
    parser.add_argument("--seconds", type=float, default=4.0 if ON_CUDA else 1.0, help="of a cell, at most")
    dtypes = ["auto", "bfloat16", "float16", "float32"]
    parser.add_argument("--compute-dtype", choices=dtypes, default="auto", help="auto: bfloat16 where it is fast here")
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention, which takes a while to compile")
    parser.add_argument("--hide-launches", action="store_true", help="time the device without waiting for Python")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    args.size = args.size or ("llama3-8b" if ON_CUDA else "tiny")
    for name, value in DEFAULTS[args.size].items():
        setattr(args, name, getattr(args, name) or value)
    if wrong := [share for share in args.shares if not 0 < share < 100]:
        parser.error(f"--shares {wrong[0]}: percent of the heads, between 1 and 99; all heads are always measured")
    for name in ("lengths", "contexts", "batch", "layers", "rounds", "seconds"):
        given = getattr(args, name)
        if given is not None and min(given if isinstance(given, list) else [given]) <= 0:
            parser.error(f"--{name} must be above 0")
    return args


def main() -> int:
    args = arguments()
    dtype = compute_dtype(DEVICE, args.compute_dtype)
    figures = header(args, dtype)
    torch.manual_seed(0)
    clock = peers.Clock(args.rounds, args.seconds, args.hide_launches)
    bench = Tables(args, SIZES[args.size], dtype, clock)
    for name in args.tables:
        figures[name] = getattr(bench, name)()
        if args.json:  # after each, so that a run that is cut off leaves something
            args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def header(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """What ran where."""
    facts = {"size": args.size, "dtype": str(dtype).removeprefix("torch."), "torch": torch.__version__}
    facts["triton"] = "none" if triton is None else triton.__version__
    facts["device"] = name_device(DEVICE)
    if ON_CUDA:
        facts["CUDA"] = torch.version.cuda
        fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split(", ")
            facts |= {field: value.strip() for field, value in zip(fields.split(","), found, strict=False)}
        except (OSError, subprocess.SubprocessError):
            facts["driver and clocks"] = "nvidia-smi does not say"
        facts["times"] = "of the device alone" if args.hide_launches else "as called, launches included"
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    if triton is None:
        print("Triton is not installed, so only dense peers run: pip install moh-llm[sparse]")
    return facts


def show(row: Row, columns: list[str]) -> None:
    """Print a row, and in words where it failed or took longer than dense attention."""
    cells, failed, ours = [], row.get("failed"), row.get("ours", False)
    for name in columns:
        (width, digits), value = FORMAT[name], row.get(name)
        if name == "ms" and value is None and ours and not failed:
            value = "interpreted"
        text = "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)
        cells.append(f"{text:{'>' if width > 0 else '<'}{abs(width)}}")
    lost = ours and row.get("ratio", 0) > 1
    words = f"cannot run: {failed}" if failed else f"MoH loses: {row['ratio'] - 1:.1%} slower" if lost else ""
    print(" ".join([*cells, words]).rstrip(), flush=True)


def verdict(words: str, limit: float, seen: list[float]) -> None:
    """What was asked and what was seen, the worst of it; nothing where it was not measured on CUDA."""
    if ON_CUDA and seen:
        print(f"asked {words}: at most {limit:.2f}; seen {max(seen):.2f}, {'met' if max(seen) <= limit else 'MISSED'}")


@dataclass
class Tables:
    """The tables; each method prints one and returns its rows."""

    args: argparse.Namespace
    shape: Shape
    dtype: torch.dtype
    clock: peers.Clock

    def cells(
        self,
        title: str,
        columns: str,
        grid: list[tuple[int, int]],
        token_bytes: float,
        measure: Callable[[int, int], list[Row]],
    ) -> list[Row]:
        """Print and return the rows of each (tokens, batch), or in words why there are none."""
        print(f"\n{title}", flush=True)
        names = ["tokens", "batch", *columns.split()]
        show({name: name for name in names}, names)
        found: list[Row] = []
        for tokens, batch in grid:
            words = peers.lacking_memory(tokens * batch * token_bytes)
            try:
                rows = [] if words else measure(tokens, batch)
            except RuntimeError as error:  # out of memory, or no dense backend that runs
                rows, words = [], f"cannot run: {next(iter(str(error).splitlines()), '')}"
            if words:
                print(f"{tokens:6} {batch:5} {words}", flush=True)
            for row in rows:
                row |= {"tokens": tokens, "batch": batch}
                show(row, names)
            found += rows
        return found

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=self.dtype)

    def layer(self) -> dict[str, list[Row]]:
        """Attention alone over lengths, shares and passes, and routing."""
        shape, routing = self.shape, []
        grid = [(n, b) for n in self.args.lengths for b in self.args.batch or [max(1, TOKENS // n)]]

        def measure(length: int, batch: int) -> list[Row]:
            heads = (shape.heads, shape.groups, shape.groups)
            # Laid out as projections leave them.
            drawn = (self.draw(batch, length, n, shape.size).transpose(1, 2) for n in heads)
            inputs, found = tuple(drawn), []
            for name, grad in {"forward": None, "with backward": self.draw(batch, length, *shape[:3:2])}.items():
                for tensor in inputs:
                    tensor.requires_grad_(grad is not None)
                rows = peers.measure(self.clock, self.layer_peers(inputs, grad), grad)
                found += [row | {"pass": name} for row in rows]
                if grad is None:
                    routing.extend(self.routing(inputs[0], rows))
            return found

        # Inputs, outputs, gradients, and one copy of keys and values for each head.
        token = 24 * shape.heads * shape.size * self.dtype.itemsize
        title = "layer: attention; share: percent of the heads; ratio: time / fastest dense"
        found = self.cells(title, "pass path share ms ratio least most gflop peak_mib error", grid, token, measure)
        print("\nrouting: routers and lists; of_attention: share of MoH's forward time, in which lists are counted")
        names = ["tokens", "batch", "path", "ms", "of_attention"]
        show({name: name for name in names}, names)
        for row in routing:
            show(row, names)
        for name, limits in ASKED.items():
            for share, limit in limits.items():
                at = {"path": "MoH", "pass": name, "share": share, "tokens": 8192}
                seen = [row["ratio"] for row in found if "ratio" in row and at.items() <= row.items()]
                verdict(f"{name}, {share} % of the heads, 8192 tokens, time / dense", limit, seen)
        lists = [row["of_attention"] for row in routing if row["path"] == "lists" and row["of_attention"]]
        verdict("lists at the worst length, time / MoH's attention", 0.03, lists)
        where = [(row["tokens"], row["batch"], row["pass"]) for row in found]
        dense = {at: row.get("peak_mib") for at, row in zip(where, found, strict=True) if "SDPA" in row["path"]}
        ours = [(at, row) for at, row in zip(where, found, strict=True) if row["path"] == "MoH" and row["share"] < 100]
        memory = [row["peak_mib"] / dense[at] for at, row in ours if row.get("peak_mib")]
        verdict("peak memory at the worst length and share, MoH / dense", 1.0, memory)
        return {"attention": found, "routing": routing}

    def layer_peers(self, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor | None) -> list[Peer]:
        """All that attend over these queries, keys and values."""
        batch, heads, length, size = inputs[0].shape
        full = 4 * batch * heads * size * length * (length + 1) / 2  # two products over the positions up to one's own
        passes = 1 if grad is None else 3
        found = [peers.best_dense(self.clock, inputs, grad, passes * full)]
        if not self.args.no_flex and (ON_CUDA or grad is None):  # on a CPU it has no backward
            found.append(Peer("FlexAttention", 100, peers.flex(length), inputs, passes * full))

        def ours(share: int, exact: bool) -> Peer:
            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
                return head_sparse_attention(q, k, v, gate, size**-0.5, all_heads=exact)

            on = full * peers.heads_on(share, heads) / heads
            gate = peers.random_gate(batch, length, heads, share).requires_grad_(grad is not None)
            name, flops, compared = ("MoH, exact", full + 2 * on, 4) if exact else ("MoH", passes * on, 3)
            return Peer(name, share, attend, (*inputs, gate), flops, ours=True, compared=compared)

        if triton is not None:
            found += [ours(share, exact=False) for share in (100, *self.args.shares)]
            found += [] if grad is None else [ours(self.middle(), exact=True)]
        return found

    def middle(self) -> int:
        """The share of what is measured at one share only."""
        return 75 if 75 in self.args.shares else self.args.shares[0]

    def routing(self, queries: torch.Tensor, rows: list[Row]) -> list[Row]:
        """Time of the layer's routers, and of the lists."""
        (batch, heads, length, _), share = queries.shape, self.middle()
        on, queries = peers.heads_on(share, heads), queries.detach().transpose(1, 2)
        hidden = self.draw(batch, length, self.shape.hidden)
        fields = {"hidden_size": self.shape.hidden, "num_attention_heads": heads, "num_hidden_layers": 1}
        fields |= {"num_key_value_heads": self.shape.groups, "num_active_heads": on, "num_shared_heads": on // 2}
        runs: dict[str, peers.Run] = {}
        for kind in ("query_norm", "linear"):
            router = MoHRouter(MoHLlamaConfig(**fields, router_type=kind), 0).to(DEVICE, self.dtype)
            runs[f"router, {kind}"] = functools.partial(router.requires_grad_(False), hidden, queries)
        if ON_CUDA and triton is not None:  # lists are made by a kernel, too
            runs["lists"] = functools.partial(selected_positions, peers.random_gate(batch, length, heads, share))
        attention = next((row.get("ms") for row in rows if row["path"] == "MoH" and row["share"] == share), None)
        found = []
        for name, taken in self.clock.turns(runs).items():
            ms = statistics.median(taken)
            row = {"tokens": length, "batch": batch, "path": name, "ms": ms}
            found.append(row | {"of_attention": ms / attention if attention else None})
        return found

    def decode(self) -> list[Row]:
        """One new token per row over a cache."""
        token = 2.4 * self.shape.groups * self.shape.size * self.dtype.itemsize  # keys, values, and room for outputs
        measure = functools.partial(decode_rows, self.clock, self.shape, self.dtype)
        title = "decode: a token per row; share: percent of the groups or heads; gb_s: of the cache that must be read"
        grid = [(n, b) for n in self.args.contexts for b in self.args.batch or BATCHES]
        found = self.cells(title, "path share ms ratio least most gb_s error", grid, token, measure)
        for share in (75, 50):
            at = {"path": "MoH by groups", "share": share, "tokens": 8192, "batch": 16}
            seen = [row["ratio"] for row in found if "ratio" in row and at.items() <= row.items()]
            verdict(f"{share} % of the groups, batch 16, 8192 in the cache, time / dense", share / 100 + 0.1, seen)
        return found

    def stack(self) -> list[Row]:
        """Prefill and decoding of a few decoder layers."""
        args = self.args
        window = 16 if args.size == "tiny" else 256
        stack = Stack(self.clock, self.shape, args.layers, self.middle(), self.dtype, window)
        title = f"stack: {args.layers} decoder layers; ms: of a prefill or a step of decoding; ratio: time / dense"
        grid = [(n, b) for n in args.contexts for b in args.batch or BATCHES]
        return self.cells(title, "pass path share ms tokens_s ratio least most error", grid, 0, stack.rows)


if __name__ == "__main__":
    sys.exit(main())
