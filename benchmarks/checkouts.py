"""Time and memory of one model by the code of two checkouts, as ratios second / first.

    python benchmarks/checkouts.py OLD NEW --model out/half --text book.jsonl         # a prefill of 8,192 tokens
    python benchmarks/checkouts.py OLD NEW --model out/groups --task decode --rows 8  # a step, after 8,192 tokens
    python benchmarks/checkouts.py OLD NEW --model out/half --task step --length 4096  # of training
    python benchmarks/checkouts.py OLD NEW --model out/half --task alone               # by torch and transformers

Checkouts are folders that hold `moh_llm/`; each has a process of its own, and they take turns in each round, so the
machine should do nothing else. Decoding uses a `MoHCache`; a step is cross-entropy, its gradients and AdamW. For
`alone` the code of `moh_llm/modeling` goes beside a copy of the model, which a fresh process loads with
`trust_remote_code=True` and without the package; memory is the peak of a prefill beyond what there was after loading.
"difference" is that of the last token's logits, norm over norm. Needs what transformers needs to load the model, and
for memory Linux.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASKS = "prefill", "decode", "step", "alone"
SHOWN = 64  # logits that are compared
Reply = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--model", type=Path, required=True, help="a converted folder, the same for both")
    parser.add_argument("--task", choices=TASKS, default="prefill")
    parser.add_argument("--text", type=Path, help="tokens are of this file (.jsonl, or plain); default: random ones")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prefill, the step, or before decoding")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="of decoding in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of a step: mixed precision"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)  # a checkout's process
    args = parser.parse_args()
    if args.peer:
        answer(args)
        return 0
    if wrong := [str(path) for path in args.checkouts if not (path / "moh_llm" / "modeling").is_dir()]:
        parser.error(f"{wrong[0]} is no checkout: it has no moh_llm/modeling")
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model} is no model's folder: it has no config.json")
    found = take_turns(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def take_turns(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the ratios; every round asks both processes, the first of them changing."""
    replies: list[list[Reply]] = [[], []]
    with tempfile.TemporaryDirectory() as scratch:
        peers = [Peer(args, path, Path(scratch) / str(number)) for number, path in enumerate(args.checkouts)]
        try:
            for peer in peers if args.task != "alone" else ():
                peer.ask()  # warms up
            for number in range(args.rounds):
                for place in (0, 1) if number % 2 == 0 else (1, 0):
                    replies[place].append(peers[place].ask())
        finally:
            for peer in peers:
                peer.end()
    logits = [own[0]["logits"] for own in replies]
    found: dict[str, Any] = {"task": args.task, "model": str(args.model), "length": args.length, "rows": args.rows}
    found |= {"checkouts": [str(path) for path in args.checkouts], "dtype": args.dtype, "replies": replies}
    found["difference"] = norm([a - b for a, b in zip(*logits, strict=True)]) / norm(logits[0])
    print(
        f"{args.task}, {args.model.name}, {args.rows} x {args.length} tokens, {args.dtype}, {args.rounds} rounds; ",
        end="",
    )
    print(f"difference {found['difference']:.1e}")
    for name, unit in (("seconds", "s"), ("mib", "MiB")):
        if name in replies[0][0]:
            values = [[reply[name] for reply in own] for own in replies]
            ratios = [b / a for a, b in zip(*values, strict=True)]
            found[name] = [statistics.median(ratios), min(ratios), max(ratios)]
            old, new = (statistics.median(own) for own in values)
            words = "{:.3f} ({:.3f} to {:.3f})".format(*found[name])
            print(f"{name}: {words}; {old:.4g} and {new:.4g} {unit}", flush=True)
    return found


def norm(numbers: list[float]) -> float:
    return sum(number * number for number in numbers) ** 0.5


class Peer:
    """The process of a checkout, which answers a line with a line; for `alone` a fresh one for each."""

    def __init__(self, args: argparse.Namespace, checkout: Path, scratch: Path):
        self.process: subprocess.Popen[str] | None = None
        self.fresh, model = args.task == "alone", args.model.resolve()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if self.fresh:
            model = with_code(model, checkout, scratch / "model")
            environment["HF_MODULES_CACHE"] = str(scratch / "modules")
        else:
            environment["PYTHONPATH"] = str(checkout.resolve())
        self.environment = environment
        self.command = [sys.executable, __file__, *map(str, args.checkouts), "--peer", str(checkout.resolve())]
        self.command += ["--model", str(model), "--task", args.task, "--dtype", args.dtype]
        self.command += ["--length", str(args.length), "--rows", str(args.rows), "--steps", str(args.steps)]
        self.command += ["--text", str(args.text.resolve())] if args.text else []

    def ask(self) -> Reply:
        """One turn. Ends this program where the process fails, whose error is on the terminal."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen(self.command, env=self.environment, **pipes)
        print("go", file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the process of {self.command[self.command.index('--peer') + 1]} failed; see above")
        if self.fresh:
            self.end()
        return json.loads(line)

    def end(self) -> None:
        """Let the process end."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def with_code(model: Path, checkout: Path, folder: Path) -> Path:
    """A folder with links to the model's files and the checkout's code of models in place of its own."""
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix != ".py" and path.is_file():
            (folder / path.name).symlink_to(path)
    for path in (checkout / "moh_llm" / "modeling").glob("*.py"):
        if path.name != "__init__.py":
            shutil.copy(path, folder)
    return folder


# ---- in the process of a checkout


def answer(args: argparse.Namespace) -> None:
    """Reply to each line of the standard input by a turn of the task."""
    replies, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no reply
    turn = None
    for _ in sys.stdin:
        turn = turn or prepare(args)
        print(json.dumps(turn()), file=replies, flush=True)


def prepare(args: argparse.Namespace) -> Callable[[], Reply]:
    """Load the model; what comes back takes one turn. Ends the process where it has other code than it should."""
    import torch

    dtype = getattr(torch, args.dtype)
    if args.task == "alone":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=True, dtype=dtype)
        if "moh_llm" in sys.modules:
            sys.exit("moh_llm was imported, so this is not torch and transformers alone")
    else:
        import moh_llm
        from moh_llm.modeling import MoHLlamaForCausalLM

        if args.peer not in Path(moh_llm.__file__).parents:
            sys.exit(f"moh_llm is {moh_llm.__file__}, and not that of {args.peer}")
        stored = torch.float32 if args.task == "step" else dtype
        model = MoHLlamaForCausalLM.from_pretrained(args.model, dtype=stored)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model, ids = model.to(device).eval(), token_ids(args).to(device)
    make = {"prefill": prefill, "alone": prefill, "decode": decode, "step": step}[args.task]
    turn = make(model, ids, args)
    return turn if args.task != "alone" else lambda: with_peak(turn)


def token_ids(args: argparse.Namespace) -> Any:
    """Ids `[rows, length]`, the same in each row; random ones without a text."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    remote = args.task == "alone"
    if args.text is None:
        size = AutoConfig.from_pretrained(args.model, trust_remote_code=remote).vocab_size
        ids = torch.randint(0, size, (args.length,), generator=torch.Generator().manual_seed(0))
    else:
        text = args.text.read_text(encoding="utf-8")
        if args.text.suffix == ".jsonl":
            text = "\n\n".join(json.loads(line)["text"] for line in text.splitlines())
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=remote)  # else it asks and waits
        ids = torch.tensor(tokenizer(text[: 16 * args.length])["input_ids"])
        if len(ids) < args.length:
            sys.exit(f"{args.text} begins with {len(ids)} tokens, fewer than {args.length}; give more text")
    return ids[: args.length].expand(args.rows, -1)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a call takes, and what it gives."""
    import torch

    begin = time.perf_counter()
    found = run()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - begin, found


def shown(out: Any) -> list[float]:
    return out.logits[0, -1, :SHOWN].float().tolist()


def prefill(model: Any, ids: Any, args: argparse.Namespace) -> Callable[[], Reply]:
    import torch

    @torch.inference_mode()
    def turn() -> Reply:
        seconds, out = timed(lambda: model(ids, use_cache=True, logits_to_keep=1))
        return {"seconds": seconds, "logits": shown(out)}

    return turn


def decode(model: Any, ids: Any, args: argparse.Namespace) -> Callable[[], Reply]:
    """A turn is some steps, each after those before it; seconds are the median step's."""
    import torch

    import moh_llm

    with torch.inference_mode():  # a checkout has the one or the other
        cache = moh_llm.MoHCache(model.config) if hasattr(moh_llm, "MoHCache") else model.make_cache()
        model(ids[:1], past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(args.rows)

    @torch.inference_mode()
    def turn() -> Reply:
        taken = [timed(lambda at=at: model(ids[:, at : at + 1], past_key_values=cache)) for at in range(args.steps)]
        return {"seconds": statistics.median(seconds for seconds, _ in taken), "logits": shown(taken[-1][1])}

    return turn


def step(model: Any, ids: Any, args: argparse.Namespace) -> Callable[[], Reply]:
    import torch

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    mixed = torch.autocast(ids.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    def run() -> Any:
        with mixed:
            out = model(ids, labels=ids, use_cache=False)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return out

    def turn() -> Reply:
        seconds, out = timed(run)
        return {"seconds": seconds, "logits": shown(out)}

    return turn


def with_peak(turn: Callable[[], Reply]) -> Reply:
    """A turn's reply, with the most memory beyond that before it, where Linux says so."""
    begin, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not begin.exists():
        return turn()

    def mib(name: str) -> float:
        lines = (line.split() for line in status.read_text().splitlines())
        return next(int(words[1]) for words in lines if words[0] == name) / 1024

    begin.write_text("5")  # the peak is from now on
    before = mib("VmRSS:")
    reply = turn()
    return reply | {"mib": mib("VmHWM:") - before}


if __name__ == "__main__":
    sys.exit(main())
