"""Small LLaMAs trained from scratch side by side: dense, MoH (Eq. 5 to 8), MoA, SwitchHead, static sparse heads.

    python benchmarks/scratch.py "$CORPORA/redpajama_c4/train*" "$CORPORA/pile/train*" --size 5m \\
        --output-dir out/scratch

With one seed all methods read the same sequences in the same order, with one schedule (linear warm-up over 5 % of the
steps, cosine to 10 %) and the same optimizer. They are compared at equal tokens, and at equal FLOPs: methods that need
fewer per token than the dense model then read more tokens, in a run of their own with its own schedule.

Losses are in nats per token on held-out documents of the corpora. 95 % intervals of the difference to the dense model,
or to another `--reference`, are by bootstrap over documents and seeds; with few seeds they are too narrow.
OUTPUT/scratch.json has every run; the same command goes on after an interruption, and with more seeds or methods it
trains those that are missing. OUTPUT/tokenizer is a byte-level BPE tokenizer, trained on the corpora without what is
held out.

FLOPs are those of a forward pass with the least that each method needs by its paper (`moh_llm.flops`); a backward pass
is taken as twice that. How large each method is made:

- MoH: the dense model's weights and the routers, with the least number of shared heads above 40 % of the active ones,
  as its paper advises. `moh-100` has all heads on: its difference to the dense model is due to its gates' weights.
  `-normalized` has the weights of the authors' code.
- MoA: 2H - 1 experts of the dense model's head size: with one head of keys and values these are the dense attention's
  parameters. The router's are taken from the feed-forward network.
- SwitchHead: heads times experts are the dense model's heads, as in its paper; heads are as large as fits into the
  dense attention's parameters, and the feed-forward network takes the rest.
- Static: the heads that are off do not exist, so that it has fewer parameters. `-averaged`: outputs of heads are
  averaged, as MoH's weights do at first.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import held_out
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from baselines.attention import (
    BaselineAttention,
    BaselineForCausalLM,
    MoAAttention,
    StaticAttention,
    SwitchHeadAttention,
)
from command import difference_interval, keep_settings, status_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from moh_llm.conversion.base import moh_fields
from moh_llm.data.mixture import Mixture, mixture_from_arguments
from moh_llm.data.records import source_documents
from moh_llm.data.sample import sample_mixture
from moh_llm.data.shards import TokenizedSource
from moh_llm.data.stream import SequenceStream, make_receipt
from moh_llm.data.tokenizer import TextTokenizer, is_held_out, open_tokenizer
from moh_llm.data.windows import validation_batches
from moh_llm.devices import choose_device, name_device
from moh_llm.errors import UserError
from moh_llm.files import check_output_folder, new_folder, write_json
from moh_llm.flops import forward_flops, forward_parts
from moh_llm.intervals import show_interval
from moh_llm.locking import lock_folder
from moh_llm.metrics import Batch, logits_of, sums_by_document
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.reading import read_json
from moh_llm.training.step import BETAS, is_decayed, warmup_cosine

END, VOCABULARY = "<end>", 4096
SETTINGS = "corpora", "size", "tokens", "context", "batch", "learning_rate", "mixed_precision", "held_out_tokens"
SHARES = 75, 50  # percent of the heads that are on
LINE = "{:<30}{:>12}{:>14}{:>12}{:>10}{:>10}  {:<20}{:>8}"


@dataclass(frozen=True)
class Size:
    """Shape of the dense model: width, feed-forward width, layers and heads, keys and values for each."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    switch_experts: int  # of a head of SwitchHead


# Parameters without embeddings: 21k (for tests), 4.8M.
SIZES = {
    "tiny": Size(32, 64, 2, 4, switch_experts=2),
    "5m": Size(256, 704, 6, 8, switch_experts=4),
}


@dataclass(frozen=True)
class Method:
    """A model to train: its config, MoH's where it is one, and the attention that takes the place of LLaMA's."""

    config: LlamaConfig
    attention: Callable[[LlamaConfig], BaselineAttention] | None = None

    def make(self) -> PreTrainedModel:
        """The model with random weights, drawn from torch's generator."""
        if self.attention is not None:
            return BaselineForCausalLM(self.config, self.attention)
        return AutoModelForCausalLM.from_config(self.config)

    def flops_per_token(self, length: int) -> float:
        """FLOPs of a forward pass, per token of a sequence of `length`."""
        if isinstance(self.config, MoHLlamaConfig):
            return forward_flops(self.config, length) / length
        parts = forward_parts(MoHLlamaConfig(**moh_fields(self.config)), length, dense=True)
        if self.attention is None:
            return sum(parts.values()) / length
        with torch.device("meta"):
            layer = self.attention(self.config)
        others = (parts["feed-forward"] + parts["vocabulary"]) / length
        return others + 2 * self.config.num_hidden_layers * layer.multiply_adds((length + 1) / 2)

    def parameters(self) -> tuple[int, int]:
        """Number of parameters, and of those that are not in the embeddings of input and output."""
        with torch.device("meta"):
            counts = {name: weight.numel() for name, weight in self.make().named_parameters()}
        inner = sum(n for name, n in counts.items() if "embed_tokens" not in name and "lm_head" not in name)
        return sum(counts.values()), inner


def make_methods(size: Size, vocab_size: int, length: int) -> dict[str, Method]:
    """All methods by name."""
    fields = {
        **{"vocab_size": vocab_size, "hidden_size": size.hidden, "intermediate_size": size.intermediate},
        **{"num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.heads},
        **{"head_dim": size.hidden // size.heads, "max_position_embeddings": length},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    averaged, dense = partial(StaticAttention, averaged=True), LlamaConfig(**fields)
    methods = {"dense": Method(dense), "dense-averaged": Method(dense, partial(averaged, heads=size.heads))}
    for percent in SHARES:
        active = size.heads * percent // 100
        moa = partial(MoAAttention, experts=2 * size.heads - 1, active=active)
        methods |= {
            f"moh-{percent}": moh(fields, active),
            f"moh-{percent}-quantized": moh(fields, active, router_score="quantized"),
            f"moh-{percent}-normalized": moh(fields, active, router_score="normalized"),
            f"static-{percent}": Method(dense, partial(StaticAttention, heads=active)),
            f"static-{percent}-averaged": Method(dense, partial(averaged, heads=active)),
            f"moa-{percent}": matched(methods["dense"], moa, methods["dense"]),
        }
    methods["switchhead"] = switchhead(methods["dense"], size)
    methods["moh-100"] = moh(fields, size.heads)
    return methods | {"moh-100-normalized": moh(fields, size.heads, router_score="normalized")}


def moh(fields: dict, active: int, **plan) -> Method:
    """MoH by Eq. 5 to 8 (two-stage, weighted, beta 0.01, in its loss), with what `plan` changes of it."""
    defaults = {"num_active_heads": active, "num_shared_heads": math.floor(0.4 * active) + 1}
    defaults |= {"router_type": "two_stage", "router_score": "weighted", "output_router_logits": True}
    return Method(MoHLlamaConfig(**fields | defaults | plan))


def switchhead(dense: Method, size: Size) -> Method:
    """SwitchHead with the dense model's number of parameters."""
    experts = size.switch_experts
    heads = size.heads // experts
    # Queries and keys, experts' values and outputs, and two routers, in multiples of the hidden size.
    room = 4 * size.hidden - 2 * heads * experts
    head_dim = room // (2 * heads * (1 + experts)) // 2 * 2  # even, for the rotary embedding
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
    config = LlamaConfig(**dense.config.to_dict() | shape)
    attention = partial(SwitchHeadAttention, experts=experts, active=2)
    return matched(Method(config), attention, dense)


def matched(shape: Method, attention: Callable[[LlamaConfig], BaselineAttention], dense: Method) -> Method:
    """`shape` with another attention, and the feed-forward width that comes nearest to the parameters of `dense`."""
    spare = dense.parameters()[1] - Method(shape.config, attention).parameters()[1]
    config = shape.config
    width = config.intermediate_size + round(spare / (3 * config.hidden_size * config.num_hidden_layers))
    return Method(LlamaConfig(**config.to_dict() | {"intermediate_size": width}), attention)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+", help="text files or globs, or one mixture (.yaml)")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of scratch.json and the tokenizer")
    parser.add_argument("--size", choices=SIZES, default="5m", help="parameters of the dense model without embeddings")
    parser.add_argument("--methods", nargs="+", help="names (default: all); the dense model is always trained")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of a run at equal tokens")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument("--reference", default="dense", help="the method that differences are to, by default dense")
    parser.add_argument("--equal", nargs="+", choices=["tokens", "flops"], default=["tokens", "flops"])
    parser.add_argument("--context", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the highest")
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no", help="of training, not of scores")
    parser.add_argument("--held-out-tokens", type=int, default=200_000)
    args = parser.parse_args()
    return status_of(locked, args)


def locked(args: argparse.Namespace) -> None:
    """`run` by one process at a time."""
    with lock_folder(args.output_dir):
        run(args)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, then print the tables."""
    mixture = mixture_from_arguments(args.corpora)
    check_output_folder(args.output_dir, overwrite=True)  # what is there is kept
    args.output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = open_tokenizer(trained_tokenizer(args, mixture))
    text_tokenizer = TextTokenizer.from_tokenizer(tokenizer)
    known = make_methods(SIZES[args.size], text_tokenizer.vocab_size, args.context)
    names = list(dict.fromkeys(["dense", *(args.methods or known)]))
    if args.reference not in names:
        raise UserError(f"--reference {args.reference}: not among the methods {' '.join(names)}; add it to --methods")
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--methods {' '.join(unknown)}: not known; choose from {', '.join(known)}")
    costs = {name: known[name].flops_per_token(args.context) for name in names}
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
    train_missing(args, record, {name: known[name] for name in names}, sources, batches)
    found, documents = record["held_out"]["overlap"], record["held_out"]["tokens_of_documents"]
    print(f"{len(documents)} held-out documents, {sum(documents):,} tokens; {found['shared']:.2%} of their", end=" ")
    print(f"{found['ngram']}-grams are in the training text; {args.seeds} seeds", end="; ")
    print(f"mixed precision {args.mixed_precision}, {record['environment']['device']}")
    for equal in args.equal:
        rows = make_table(record, names, equal, args.seeds, args.reference)
        print(f"\nat equal {equal}", *table_lines(record, rows, args.reference), sep="\n")
        record["tables"][equal] = rows
    write_json(args.output_dir / "scratch.json", record)


def train_missing(
    args: argparse.Namespace,
    record: dict[str, Any],
    methods: dict[str, Method],
    sources: Sequence[TokenizedSource],
    batches: Sequence[Batch],
) -> None:
    """Train and score the runs that the record lacks, one seed after the other; each is written when it ends."""
    device = choose_device()
    every = itertools.product(range(args.seeds), args.equal, methods)
    jobs = dict.fromkeys((name, seed, record["planned"][equal][name]) for seed, equal, name in every)
    missing = [job for job in jobs if key(*job) not in record["runs"]]
    with tqdm(total=sum(job[2] for job in missing), unit="step", smoothing=0, dynamic_ncols=True) as bar:
        for name, seed, steps in missing:
            stream = SequenceStream(sources, args.context, seed)
            torch.manual_seed(seed)
            model = methods[name].make().to(device)
            bar.set_description(f"{name}, seed {seed}")
            train(model, stream, steps, args, bar)
            record["runs"][key(name, seed, steps)] = {
                "nats": score(model, batches)[:, 1].tolist(),
                "data": make_receipt(stream, steps * args.batch),
            }
            write_json(args.output_dir / "scratch.json", record)


def trained_tokenizer(args: argparse.Namespace, mixture: Mixture) -> Path:
    """The folder of the tokenizer that is trained on the mixture's training documents, once.

    Raises UserError where one of other text or another size is there.
    """
    folder, settings = args.output_dir / "tokenizer", {"vocabulary size": VOCABULARY, "corpora": args.corpora}
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
    words = {"special_tokens": [END], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    backend.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=VOCABULARY, **words))
    with new_folder(folder) as temporary:
        keep_settings(temporary, settings)
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(temporary)
    return folder


def opened(
    args: argparse.Namespace, tokenizer: TextTokenizer, batches: Sequence[Batch], sources: Sequence[TokenizedSource]
) -> dict[str, Any]:
    """The record of OUTPUT, or a new one. Raises UserError where it is of other settings."""
    path = args.output_dir / "scratch.json"
    record = read_json(path) if path.exists() else None
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"tokenizer": tokenizer.sha256, "training_tokens": [len(source.train) for source in sources]}
    if record:
        if differ := [name for name in settings if record["settings"].get(name) != settings[name]]:
            raise UserError(f"{path} is of another {', '.join(differ)}; name another --output-dir, or give the same")
        return record
    read = held_out.training_ngrams(sources)
    documents = torch.cat([batch["documents"][:, 1:][batch["labels"][:, 1:] != -100] for batch in batches])
    return {
        "settings": settings,
        "environment": {"device": name_device(choose_device()), "torch": torch.__version__}
        | {"transformers": transformers.__version__},
        "held_out": {
            "tokens_of_documents": documents.unique(return_counts=True)[1].tolist(),
            "overlap": {"ngram": held_out.NGRAM, "shared": read.overlap(*held_out.numbered(batches))},
        },
    } | {part: {} for part in ("methods", "planned", "runs", "tables")}


def train(model: PreTrainedModel, stream: SequenceStream, steps: int, args: argparse.Namespace, bar: tqdm) -> None:
    """Train a model on the first sequences of the stream. Raises UserError where the loss is not finite."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, weight in model.named_parameters():
        groups[is_decayed(name, weight)].append(weight)
    parts = [{"params": weights, "weight_decay": 0.1 * decayed} for decayed, weights in groups.items()]
    optimizer, highest = torch.optim.AdamW(parts, betas=BETAS, fused=True), args.learning_rate
    model.train()
    for step in range(steps):
        batch = {name: tensor.to(model.device) for name, tensor in stream.batch(step * args.batch, args.batch).items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=args.mixed_precision == "bf16"):
            loss = model(**batch, use_cache=False).loss
        if not loss.isfinite():
            raise UserError(f"{bar.desc}: the loss is {loss.item()} in step {step + 1}; lower --learning-rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(step, steps // 20, steps, highest / steps, highest, highest / 10)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        bar.update()


@torch.no_grad()
def score(model: PreTrainedModel, batches: Sequence[Batch]) -> np.ndarray:
    """Predicted tokens of each held-out document, and their cross-entropy in nats, `[D, 2]`."""
    logits = logits_of(model.eval())
    nats, documents = [], []
    for batch in batches:
        counted = (targets := batch["labels"][:, 1:]) != -100
        predicted = logits(batch)[:, :-1].float().cpu()[counted]
        nats.append(F.cross_entropy(predicted, targets[counted], reduction="none"))
        documents.append(batch["documents"][:, 1:][counted])
    # The other columns are those of comparisons with a reference.
    return sums_by_document(F.pad(torch.cat(nats).double()[:, None], (0, 3)), documents)[:, :2]


def key(name: str, seed: int, steps: int) -> str:
    """What a run is called in the record."""
    return f"{name}, seed {seed}, {steps} steps"


def make_table(
    record: dict[str, Any], names: Sequence[str], equal: str, seeds: int, reference: str
) -> list[dict[str, Any]]:
    """A row for each method: losses of its runs at equal tokens or FLOPs, and their difference to the reference's."""
    tokens, settings = np.array(record["held_out"]["tokens_of_documents"]), record["settings"]
    runs, steps = record["runs"], record["planned"][equal]
    nats = {name: np.array([runs[key(name, seed, steps[name])]["nats"] for seed in range(seeds)]) for name in names}
    rows = []
    for name, own in nats.items():
        losses = own.sum(1) / tokens.sum()
        row = {"method": name, "tokens": steps[name] * settings["batch"] * settings["context"]}
        row |= {"loss": losses.mean().item(), "losses": losses.tolist()}
        if name != reference:
            row["difference"] = ((own - nats[reference]).sum(1) / tokens.sum()).mean().item()
            row["interval"] = difference_interval(tokens, own, nats[reference])
        rows.append(row)
    return rows


def table_lines(record: dict[str, Any], rows: Sequence[dict[str, Any]], reference: str) -> Iterator[str]:
    """The lines of a table: "seeds" is the standard deviation over seeds."""
    yield f"difference to {reference}, in nats per token"
    yield LINE.format("", "parameters", "FLOPs/token", "tokens", "loss", "difference", "95 %", "seeds")
    for row in rows:
        method = record["methods"][row["method"]]
        sizes = f"{method['parameters']:,}", f"{method['flops_per_token']:,.0f}", f"{row['tokens']:,}"
        spread = f"{np.std(row['losses'], ddof=1):.4f}" if len(row["losses"]) > 1 else "-"
        difference = "-", ""
        if "difference" in row:
            difference = f"{row['difference']:+.4f}", show_interval(row["interval"], "+.4f")
        yield LINE.format(row["method"], *sizes, f"{row['loss']:.4f}", *difference, spread)


if __name__ == "__main__":
    sys.exit(main())
