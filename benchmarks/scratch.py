"""Small LLaMAs trained from scratch side by side: dense, MoH (Eq. 5 to 8), MoA, SwitchHead, GQE, static sparse heads.

    python benchmarks/scratch.py "$CORPORA/redpajama_c4/train*" "$CORPORA/pile/train*" --size 5m --output out/scratch

With one seed all methods read the same sequences in the same order, with one schedule (linear warm-up over 5 % of the
steps, cosine to 10 %) and the same optimizer. They are compared at equal tokens, and at equal FLOPs: methods that need
fewer per token than the dense model then read more tokens, in a run of their own with its own schedule. FLOPs and
sizes are those of `benchmarks/scratch_methods.py`: what a method needs by its paper, not what is computed here, so that
seconds say nothing about what it could save. `--methods all` adds ablations of MoH; `--list` prints methods, their
parameters and FLOPs, and stops. With `--save` models are kept, for `convert.py`:

    python benchmarks/scratch.py TEXT... --output out/scratch --methods mixtral --equal tokens --seeds 1 --save
    python convert.py out/scratch/models/mixtral-seed-0-488-steps --output out/moh-mixtral --calibration TEXT...

Losses are in nats per token on held-out documents of the corpora. 95 % intervals of the difference to the dense model,
or to another `--reference`, are by bootstrap over documents and seeds; with few seeds they are too narrow.
OUTPUT/scratch.json has every run; the same command goes on after an interruption, and with more seeds or methods it
trains those that are missing. Without `--tokenizer` a byte-level BPE tokenizer is trained on the corpora, without what
is held out, in OUTPUT/tokenizer.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import held_out
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from command import keep_settings
from overlap import NGrams, numbered
from scratch_methods import SIZES, Method, make_methods
from scratch_tables import key, make_table, table_lines
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moh_llm.data.mixture import Mixture, mixture_from_arguments
from moh_llm.data.records import source_documents
from moh_llm.data.sample import sample_mixture
from moh_llm.data.shards import TokenizedSource
from moh_llm.data.stream import SequenceStream, make_receipt
from moh_llm.data.tokenizer import TextTokenizer, is_held_out, open_tokenizer
from moh_llm.data.windows import validation_batches
from moh_llm.devices import choose_device, compute_dtype, name_device
from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder, write_json
from moh_llm.locking import lock_folder
from moh_llm.metrics import Batch, logits_of, sums_by_document
from moh_llm.reading import read_json
from moh_llm.training.config import SharedHeadsConfig
from moh_llm.training.optimizer import is_decayed, warmup_cosine
from moh_llm.training.shared_heads import BETAS, LOGITS, fix_shared_heads, rate_of_logits, set_temperature

END = "<end>"
SETTINGS = "corpora", "size", "tokens", "context", "batch", "learning_rate", "mixed_precision", "held_out_tokens"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+", help="text files or globs, or one mixture (.yaml)")
    parser.add_argument("--output", type=Path, required=True, help="folder of scratch.json and the tokenizer")
    parser.add_argument("--size", choices=SIZES, default="5m", help="parameters of the dense model without embeddings")
    parser.add_argument("--methods", nargs="+", help="names, or all; the dense model is always trained")
    parser.add_argument("--list", action="store_true", help="print the methods and stop")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of a run at equal tokens")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument("--reference", default="dense", help="the method that differences are to, by default dense")
    parser.add_argument("--equal", nargs="+", choices=["tokens", "flops"], default=["tokens", "flops"])
    parser.add_argument("--tokenizer", help="folder or Hub id (default: train one)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of the tokenizer that is trained")
    parser.add_argument("--context", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the highest")
    parser.add_argument(
        "--mixed-precision",
        choices=["auto", "no", "bf16"],
        default="auto",
        help="of training, not of scores (auto: what OUTPUT was begun with, bf16 where this device computes it fast)",
    )
    parser.add_argument("--held-out-tokens", type=int, default=200_000)
    parser.add_argument(
        "--save", action="store_true", help="keep trained models in OUTPUT/models, but for those of other papers"
    )
    args = parser.parse_args()
    if min(args.seeds, args.context, args.batch) < 1:
        parser.error("--seeds, --context and --batch must be at least 1")
    try:
        with lock_folder(args.output):
            run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    """Train what is missing, then print the tables."""
    mixture = mixture_from_arguments(args.corpora)
    check_output_folder(args.output, overwrite=True)  # what is there is kept
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer = open_tokenizer(args.tokenizer or trained_tokenizer(args, mixture))
    text_tokenizer = TextTokenizer.of(tokenizer)
    known, compared = make_methods(SIZES[args.size], text_tokenizer.vocab_size, args.context)
    names = list(known) if args.methods == ["all"] else list(dict.fromkeys(["dense", *(args.methods or compared)]))
    if args.reference not in names:
        raise UserError(f"--reference {args.reference}: not among the methods {' '.join(names)}; add it to --methods")
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--methods {' '.join(unknown)}: not known; choose from {', '.join(known)}")
    costs = {name: known[name].flops_per_token(args.context) for name in names}
    if args.list:
        for name in names:
            total, inner = known[name].parameters()
            sizes = f"{total:>12,} parameters{inner:>12,} without embeddings"
            print(f"{name:<30}{sizes}{costs[name]:>14,.0f} FLOPs per token")
        return
    steps = args.tokens // (args.context * args.batch)
    if steps < 2:
        raise UserError(f"--tokens {args.tokens} make {steps} steps of {args.context * args.batch} tokens; raise it")
    # All that a run may read, whatever methods are named: the order of the sequences depends on how many there are.
    sources = sample_mixture(mixture, tokenizer, 2 * args.tokens, args.held_out_tokens, window=args.context)
    batches = validation_batches(sources, args.context, args.held_out_tokens, args.batch)
    record = opened(args, text_tokenizer, batches, sources)
    for name in names:
        total, inner = known[name].parameters()
        record["methods"][name] = {"parameters": total, "inner": inner, "flops_per_token": costs[name]}
        record["planned"].setdefault("tokens", {})[name] = steps
        record["planned"].setdefault("flops", {})[name] = max(2, round(steps * costs["dense"] / costs[name]))
    train_missing(args, record, {name: known[name] for name in names}, sources, batches, tokenizer)
    found, documents = record["held_out"]["overlap"], record["held_out"]["tokens_of_documents"]
    print(f"{len(documents)} held-out documents, {sum(documents):,} tokens; {found['shared']:.2%} of their", end=" ")
    print(f"{found['ngram']}-grams are in the training text; {args.seeds} seeds", end="; ")
    print(f"mixed precision {args.mixed_precision}, {record['environment']['device']}")
    for equal in args.equal:
        rows = make_table(record, names, equal, args.seeds, args.reference)
        print(f"\nat equal {equal}", *table_lines(record, rows, args.reference), sep="\n")
        record["tables"][equal] = rows
    write_json(args.output / "scratch.json", record)


def train_missing(
    args: argparse.Namespace,
    record: dict[str, Any],
    methods: dict[str, Method],
    sources: Sequence[TokenizedSource],
    batches: Sequence[Batch],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Train and score the runs that the record lacks, one seed after the other; each is written when it ends."""
    device = choose_device()
    planned = (
        (name, seed, record["planned"][equal][name])
        for seed, equal, name in itertools.product(range(args.seeds), args.equal, methods)
    )
    missing = [job for job in dict.fromkeys(planned) if key(*job) not in record["runs"]]
    with tqdm(total=sum(job[2] for job in missing), unit="step", smoothing=0, dynamic_ncols=True) as bar:
        for name, seed, steps in missing:
            stream = SequenceStream(sources, args.context, seed)
            torch.manual_seed(seed)
            model = methods[name].make().to(device)
            bar.set_description(f"{name}, seed {seed}")
            began = time.perf_counter()
            train(model, stream, steps, args, bar)
            record["runs"][key(name, seed, steps)] = {
                "seconds": round(time.perf_counter() - began, 1),
                "nats": score(model, batches)[:, 1].tolist(),
                "data": make_receipt(stream, steps * args.batch),
            }
            if args.save and methods[name].attention is None:
                with new_folder(args.output / "models" / f"{name}-seed-{seed}-{steps}-steps", overwrite=True) as folder:
                    model.save_pretrained(folder)
                    tokenizer.save_pretrained(folder)
            write_json(args.output / "scratch.json", record)


def trained_tokenizer(args: argparse.Namespace, mixture: Mixture) -> Path:
    """The folder of the tokenizer that is trained on the mixture's training documents, once.

    Raises:
        UserError: one of other text or another size is there.
    """
    folder, settings = args.output / "tokenizer", {"vocabulary size": args.vocab_size, "corpora": args.corpora}
    if folder.is_dir():
        keep_settings(folder, settings)
        return folder

    def texts() -> Iterator[str]:
        for source in mixture.sources:
            for group, text in source_documents(source):
                if not is_held_out(group, mixture.validation_share):
                    yield text

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts(),
        trainers.BpeTrainer(
            vocab_size=args.vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    with new_folder(folder) as temporary:
        keep_settings(temporary, settings)
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(temporary)
    return folder


def opened(
    args: argparse.Namespace, tokenizer: TextTokenizer, batches: Sequence[Batch], sources: Sequence[TokenizedSource]
) -> dict[str, Any]:
    """The record of OUTPUT, or a new one. Raises UserError where it is of other settings."""
    path = args.output / "scratch.json"
    record = read_json(path) if path.exists() else None
    if args.mixed_precision == "auto":
        fast = "bf16" if compute_dtype(choose_device()) == torch.bfloat16 else "no"
        args.mixed_precision = record["settings"].get("mixed_precision", fast) if record else fast
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"tokenizer": tokenizer.sha256, "training_tokens": [len(source.train) for source in sources]}
    if record:
        if differ := [name for name in settings if record["settings"].get(name) != settings[name]]:
            raise UserError(f"{path} is of another {', '.join(differ)}; name another --output, or give the same")
        return record
    device = choose_device()
    read = NGrams(numbered(source.train) for source in sources)
    documents = torch.cat([batch["documents"][:, 1:][batch["labels"][:, 1:] != -100] for batch in batches])
    return {
        "settings": settings,
        "environment": {
            "device": name_device(device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "held_out": {
            "tokens_of_documents": documents.unique(return_counts=True)[1].tolist(),
            "overlap": held_out.describe(held_out.overlap(batches, read)),
        },
        "methods": {},
        "planned": {},
        "runs": {},
        "tables": {},
    }


def train(model: PreTrainedModel, stream: SequenceStream, steps: int, args: argparse.Namespace, bar: tqdm) -> None:
    """Train a model on the first sequences of the stream. Raises UserError where the loss is not finite."""
    groups = {(True, False): [], (False, False): [], (False, True): []}  # decayed; logits of shared heads
    for name, weight in model.named_parameters():
        groups[is_decayed(name, weight), name.endswith(LOGITS)].append(weight)
    learning = steps // 2 if groups[False, True] else 0  # steps
    optimizer = torch.optim.AdamW(
        [
            {
                "params": weights,
                "weight_decay": 0.1 * decayed,
                "logits": logits,
                "betas": BETAS if logits else (0.9, 0.95),
            }
            for (decayed, logits), weights in groups.items()
        ],
        fused=True,
    )
    highest = args.learning_rate
    model.train()
    for step in range(steps):
        batch = {name: tensor.to(model.device) for name, tensor in stream.batch(step * args.batch, args.batch).items()}
        if learning:
            set_temperature(model, step, learning)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=args.mixed_precision == "bf16"):
            loss = model(**batch, use_cache=False).loss
        if not loss.isfinite():
            raise UserError(f"{bar.desc}: the loss is {loss.item()} in step {step + 1}; lower --learning-rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(step, steps // 20, steps, highest / steps, highest, highest / 10)
            if group["logits"]:
                group["lr"] = rate_of_logits(step, max(1, learning), SharedHeadsConfig.learning_rate)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        bar.update()
    if learning:
        fix_shared_heads(model)


@torch.no_grad()
def score(model: PreTrainedModel, batches: Sequence[Batch]) -> np.ndarray:
    """Predicted tokens of each held-out document, and their cross-entropy in nats, `[D, 2]`."""
    logits = logits_of(model.eval())
    nats, documents = [], []
    for batch in batches:
        targets = batch["labels"][:, 1:]
        counted = targets != -100
        predicted = logits(batch)[:, :-1].float().cpu()[counted]
        nats.append(F.cross_entropy(predicted, targets[counted], reduction="none"))
        documents.append(batch["documents"][:, 1:][counted])
    # The other columns are those of comparisons with a reference.
    return sums_by_document(F.pad(torch.cat(nats).double()[:, None], (0, 3)), documents)[:, :2]


if __name__ == "__main__":
    sys.exit(main())
