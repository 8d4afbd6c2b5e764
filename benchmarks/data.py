"""What data cost: tokenising against the bare tokenizer, the stream against a training step, start and memory.

    python benchmarks/data.py data_mixtures/paper_local.yaml --tokenizer BASE

Five tables; speeds are ratios to a peer in the same run:
tokenising: tokens/s of the command `moh-llm tokenize`, its start included, against `encode_batch_fast` (no offsets)
and `encode_batch` of the tokenizers library on the same documents in memory, with a thread where we have a process;
shares: planned and realised;
stream: tokens/s of batches from the shards in one process, against forward and backward of a model of SmolLM2-135M's
shape in the dtype that this device computes fast; start: seconds from opening the shards to the first batch, in a fresh
process after imports;
memory: of that process, private and mapped, for sparse corpora of several sizes.
"""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from moh_llm.data.locate import locate
from moh_llm.data.mixture import load_mixture
from moh_llm.data.records import Reading, read_documents
from moh_llm.data.shards import Shard, TokenizedSource, TokenStream, open_tokens
from moh_llm.data.stream import SequenceStream
from moh_llm.data.tokenize import available_cores, tokenize_mixture
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.devices import choose_device, compute_dtype, synchronize

LENGTH, BATCH = 512, 4
DOCUMENT = 1000  # tokens of each document of a sparse corpus


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixture", help="mixture file, or a folder that --probe is told")
    parser.add_argument("--tokenizer", help="folder or Hub id")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each timing; medians are reported")
    parser.add_argument("--copies", type=int, default=4, help="tokenise the text this many times over")
    parser.add_argument("--scratch", help="folder for shards and sparse files (default: a temporary one)")
    parser.add_argument("--skip", nargs="*", default=[], choices=["tokenize", "stream", "memory"])
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)  # the fresh process: first batch at this block
    args = parser.parse_args()
    if args.probe is not None:
        probe(Path(args.mixture), args.probe)
        return 0

    mixture, tokenizer = load_mixture(args.mixture), TextTokenizer.load(args.tokenizer)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        scratch = Path(folder)
        if "tokenize" not in args.skip:
            tokenising(args.mixture, tokenizer, scratch, args.rounds, args.copies)
        tokenize_mixture(mixture, tokenizer, scratch / "tokens")
        shares(scratch / "tokens")
        if "stream" not in args.skip:
            stream(scratch / "tokens", args.rounds)
        for number in (0, 10**9):
            found = [fresh_process(scratch / "tokens", number) for _ in range(args.rounds)]
            seconds = statistics.median(f["seconds"] for f in found)
            print(f"first batch at block {number:>13,}: {seconds:.4f} s after opening {len(mixture.sources)} sources")
        if "memory" not in args.skip:
            for tokens in (10**8, 10**10):
                sparse_corpus(scratch / f"sparse{tokens}", tokens)
                found = fresh_process(scratch / f"sparse{tokens}", 0)
                print(
                    f"memory with {tokens:>14,} tokens in 7 sources: {found['private_mib']:.0f} MiB private "
                    f"({found['private_mib'] - found['before_mib']:+.1f} by opening and reading 1,000 blocks), "
                    f"{found['mapped_mib']:.0f} MiB mapped"
                )
    return 0


def tokenising(mixture_file: str, tokenizer: TextTokenizer, scratch: Path, rounds: int, copies: int) -> None:
    """The command, from its start to its end, and the bare tokenizer, in turns, on all cores."""
    mixture = load_mixture(mixture_file)
    sources = {s.name: {"weight": s.weight, "files": [f.path for f in locate(s)] * copies} for s in mixture.sources}
    (scratch / "copies.yaml").write_text(json.dumps({"sources": sources}))  # JSON is YAML
    mixture = load_mixture(scratch / "copies.yaml")
    files = [(file, source) for source in mixture.sources for file in locate(source)]
    documents = [text for file, source in files for text in read_documents(file, source, Reading())]
    size = sum(len(text.encode()) for text in documents)

    def bare(encode: Callable) -> float:
        began = time.perf_counter()
        for first in range(0, len(documents), 128):
            encode(documents[first : first + 128])
        return time.perf_counter() - began

    def command(output: Path) -> float:
        began = time.perf_counter()
        arguments = [str(scratch / "copies.yaml"), "--tokenizer", tokenizer.name, "--output", str(output)]
        subprocess.run([sys.executable, "-m", "moh_llm.cli", "tokenize", *arguments], check=True, capture_output=True)
        return time.perf_counter() - began

    ours, alone = "moh-llm tokenize", "  without its start"
    times: dict[str, list[float]] = {ours: [], alone: [], "encode_batch_fast": [], "encode_batch": []}
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    for number in range(rounds):
        times[ours].append(command(scratch / f"round{number}"))
        record = json.loads((scratch / f"round{number}" / "mixture.json").read_text())
        times[alone].append(record["seconds"])
        times["encode_batch_fast"].append(bare(tokenizer.backend.encode_batch_fast))
        times["encode_batch"].append(bare(tokenizer.backend.encode_batch))
    tokens, median = record["tokens"], {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"tokenising {size / 1e6:.1f} MB, {tokens:,} tokens, {available_cores()} cores, medians of {rounds}")
    for name, seconds in times.items():
        spread = f"{tokens / max(seconds) / 1e3:,.0f} to {tokens / min(seconds) / 1e3:,.0f}"
        ratio = "" if name in (ours, alone) else f"; ratio {median[name] / median[ours]:.2f}"
        ratio += "" if name in (ours, alone) else f", without our start {median[name] / median[alone]:.2f}"
        print(f"  {name:<20}{tokens / median[name] / 1e3:>7,.0f} thousand tokens/s ({spread}){ratio}", flush=True)


def shares(folder: Path, count: int = 10_000) -> None:
    """Planned and realised shares of the first blocks, and the largest difference on the way, in blocks."""
    blocks = SequenceStream(open_tokens(folder), LENGTH, seed=0)
    planned, worst = np.array([source.weight for source in blocks.sources]), np.zeros(len(blocks.sources))
    found = np.zeros(len(blocks.sources), dtype=int)
    for number in range(count):
        found[blocks.locate(number)[0]] += 1
        worst = np.maximum(worst, np.abs(found - planned * (number + 1)))
    print(f"shares after {count:,} blocks, and the largest difference on the way in blocks")
    for source, plan, got, most in zip(blocks.sources, planned, found, worst, strict=True):
        print(f"  {source.name:<24} planned {plan:>8.4%}  realised {got / count:>8.4%}  at most {most:.2f} blocks off")


def stream(folder: Path, rounds: int) -> None:
    """Batches in one process, against a training step's appetite."""
    blocks, rates = SequenceStream(open_tokens(folder), LENGTH, seed=0), []
    for number in range(rounds):
        began = time.perf_counter()
        for first in range(number * 2000, (number + 1) * 2000, BATCH):
            blocks.batch(first, BATCH)
        rates.append(2000 * LENGTH / (time.perf_counter() - began))
    device = choose_device()
    dtype = compute_dtype(device)
    appetite = training_step(rounds, device, dtype)
    rate = statistics.median(rates)
    print(
        f"stream, {len(blocks.sources)} sources, blocks of {LENGTH}: {rate / 1e6:.2f} million tokens/s in one process; "
        f"a training step of the 135M shape takes {appetite:,.0f} tokens/s in {str(dtype).removeprefix('torch.')}: "
        f"{rate / appetite:,.0f} x"
    )


def training_step(rounds: int, device: torch.device, dtype: torch.dtype) -> float:
    """Tokens/s of forward and backward of a dense model of SmolLM2-135M's shape, random weights."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    ids = torch.randint(0, 49152, (BATCH, LENGTH), device=device)
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return BATCH * LENGTH / statistics.median(seconds[1:])


def fresh_process(folder: Path, number: int) -> dict[str, float]:
    """`probe` in a process of its own."""
    command = [sys.executable, __file__, str(folder), "--probe", str(number)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def probe(folder: Path, number: int) -> None:
    """Open, read the first batch at block `number`, then 1,000 blocks all over; print seconds and memory."""
    before = memory()["RssAnon"]
    began = time.perf_counter()
    blocks = SequenceStream(
        open_tokens(folder) if (folder / "mixture.json").exists() else open_sparse(folder), LENGTH, 0
    )
    blocks.batch(number, BATCH)
    seconds = time.perf_counter() - began
    blocks.batch(number, 1000)
    found = memory()
    print(
        json.dumps(
            {
                "seconds": seconds,
                "before_mib": before / 1024,
                "private_mib": found["RssAnon"] / 1024,
                "mapped_mib": found["RssFile"] / 1024,
            }
        )
    )


def memory() -> dict[str, int]:
    """This process's memory in KiB, by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines) if "kB" in value}


def sparse_corpus(folder: Path, tokens: int) -> None:
    """7 sources of `tokens` zeros in all, in shards of at most 10^9, with true indices: the shape of a large corpus."""
    folder.mkdir()
    for source in range(7):
        left, number = tokens // 7, 0
        while left >= DOCUMENT:
            documents = min(left, 10**9) // DOCUMENT
            path = folder / f"{source}-{number:03d}.ds"
            with path.open("wb") as file:
                file.truncate(2 * documents * DOCUMENT)
            ends = np.arange(1, documents + 1, dtype="<u8") * DOCUMENT
            path.with_name(path.name + ".index").write_bytes(ends.tobytes())
            left, number = left - documents * DOCUMENT, number + 1


def open_sparse(folder: Path) -> list[TokenizedSource]:
    """The sources of `sparse_corpus`."""
    sources = []
    for source in range(7):
        shards = []
        for path in sorted(folder.glob(f"{source}-*.ds")):
            documents = path.with_name(path.name + ".index").stat().st_size // struct.calcsize("<Q")
            shards.append(Shard(documents * DOCUMENT, path, np.dtype("<u2"), documents))
        stream_ = TokenStream.of(shards)
        sources.append(TokenizedSource(str(source), 1 / 7, stream_, stream_.part(0, 0)))
    return sources


if __name__ == "__main__":
    sys.exit(main())
