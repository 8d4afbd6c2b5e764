"""How near converted models are to their base at long context, by position, and what they still retrieve.

    python benchmarks/long_context.py out/half --base BASE --context 8192 long1.jsonl long2.jsonl
    python benchmarks/long_context.py out/half --also out/third out/fixed --base BASE --json half.json *.jsonl

Reads the first `--context` tokens of the first documents that have as many, in turn from each text. By position in the
document: perplexity / base perplexity and KL(base || model) in nats per token, with 95 % intervals over
documents. Keys read: the share of the base's keys that attention needs, from the heads that are on in this text; a
local fallback reads its window and sinks. FLOPs are those of a forward pass in theory (`moh_llm.flops`). Retrieval, in
the documents' text: tokens copied of random strings, and whole answers to passkeys and key-value pairs, by distance, as
shares of the base's right answers, with intervals by bootstrap over prompts. A run with `--json` that was interrupted
goes on where it stopped.

With `--presses` documents are read as a prompt of 2,048 tokens and the others in one pass, models with their
`MoHCache`, and caches are measured. Rows below a model's are of the presses that are named, classes of kvpress
(`baselines/pressed.py`): of the base's cache of the prompt they keep as many bytes as the model's cache takes then.
So do rows of the models of `--pressed`, from whose groups that are on the presses drop keys.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from baselines.pressed import press_of, read_pressed
from command import add_compute_dtype, cache_bytes, device_and_dtype, kind_of_device, load_models, status_of
from held_out import texts_of
from tqdm import tqdm
from transformers import AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

from moh_llm import MoHCache
from moh_llm.analysis.retrieval import make_prompt, score
from moh_llm.errors import UserError
from moh_llm.files import write_json
from moh_llm.flops import forward_flops
from moh_llm.intervals import show_figure
from moh_llm.metrics import Comparison, compare_predictions
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.identity import identify

EDGES = (0, 512, 2048, 8192, 32768, 131072)
DISTANCES = (256, 512, 1024, 2048, 4096, 7000)  # of retrieval
ASKED = ("copying", "passkey", "key-value")  # of retrieval: RULER asks for UUIDs
HEADLINE = 2048  # from this position on
ROWS = 512  # predictions whose logits are held at once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="converted folder")
    parser.add_argument("text", nargs="+", help="text files with long documents")
    parser.add_argument("--also", nargs="+", default=[], metavar="MODEL", help="more converted folders")
    parser.add_argument("--base", required=True, help="the dense model they were converted from")
    parser.add_argument("--context", type=int, default=8192, help="tokens read of each document")
    parser.add_argument("--documents", type=int, help="how many documents (default: 20, or as many as there are)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each retrieval task; 0: none")
    parser.add_argument("--presses", nargs="*", metavar="CLASS", help="such as SnapKVPress, or none")
    parser.add_argument("--pressed", nargs="+", default=[], metavar="MODEL", help="models without a router, to press")
    add_compute_dtype(parser, "float32", "since bfloat16 rounds by as much as the smallest KL here")
    parser.add_argument("--json", type=Path, help="write the figures there, after each document")
    return status_of(run, parser.parse_intermixed_args())


def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    names, cached = [args.model, *args.also], args.presses is not None
    presses = {name: press_of(name) for name in args.presses} if cached else None
    if cached and args.context < HEADLINE + 2:
        raise UserError(f"--presses: --context {args.context} leaves nothing to score after {HEADLINE} tokens")
    base, models = load_models(args.base, [*names, *args.pressed], device, dtype)
    pressed = {name: models.pop(name) for name in args.pressed}
    for model in pressed.values():
        if not args.presses or model.config.router_type != "none" or model.config.head_fallback != "local":
            raise UserError("--pressed takes models by convert.py --fallback local --router none, and --presses")
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    documents = long_documents(args.text, tokenizer, args.context, args.documents)
    room = args.context - 100 * len(DISTANCES)  # the questions come last
    distances = [distance for distance in DISTANCES if distance <= room]
    asked = {"models": {name: identify(name).sha256 for name in (args.base, *names, *pressed)}, "texts": args.text}
    asked |= {"context": args.context, "distances": distances, "dtype": computed, "device": kind_of_device(device)}
    asked |= {"presses": args.presses} if cached else {}
    asked |= {"pressed": args.pressed} if pressed else {}
    found: dict[str, Any] = {"asked": asked, "documents": {}, "prompts": {}}
    if args.json and args.json.exists():
        earlier = json.loads(args.json.read_text())
        if earlier.get("asked") != asked:
            raise UserError(f"{args.json} holds figures of other models or text; give another file, or delete it")
        found |= {name: earlier[name] for name in ("documents", "prompts")}

    def save() -> None:
        if args.json:
            write_json(args.json, found)

    # A prompt is told by the document that it is made of, too: there may be more of them in the next call.
    keys = [f"{n} of document {n % len(documents)}" for n in range(args.prompts if distances else 0)]
    with torch.inference_mode():
        for number, (text, ids) in enumerate(tqdm(documents, desc="documents", unit="document")):
            if str(number) not in found["documents"]:
                found["documents"][str(number)] = {"text": text} | compare(base, models, ids, presses, pressed)
                save()
        for number, key in enumerate(tqdm(keys, desc="retrieval", unit="prompt")):
            if key not in found["prompts"]:
                text = documents[number % len(documents)][1].tolist()
                prompt = make_prompt(text, args.context, distances, tokenizer, number, ASKED)
                peers = {"base": base, **models}
                scores = {name: score(prompt, partial(logits_at, model)) for name, model in peers.items()}
                found["prompts"][key] = json.loads(json.dumps(scores))  # distances become text, as in the file
                save()
    count = len(documents)
    rows = [found["documents"][str(number)] for number in range(count)]
    read = [name for name in rows[0] if name != "text"]
    print_positions(rows, read, args.context)
    for name in read if cached else ():
        sizes = " and ".join(f"{size / 2**20:.2f}" for size in np.mean([row[name]["bytes"] for row in rows], axis=0))
        print(f"{Path(name).name[-24:]:<24} cache of {sizes} MiB after {HEADLINE} and after {args.context} tokens")
    for name, model in models.items():
        flops = forward_flops(model.config, args.context) / forward_flops(model.config, args.context, dense=True)
        print(f"{Path(name).name[-24:]:<24} in theory {flops:.3f} of the base's FLOPs")
    prompts = [found["prompts"][key] for key in keys]
    far = [distance for distance in distances if distance > max(model.config.local_window for model in models.values())]
    for task in ASKED if prompts else ():
        print_retrieval(task, prompts, names, distances, far)


def long_documents(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, count: int | None
) -> list[tuple[str, torch.Tensor]]:
    """The first `length` tokens of `count` documents that have as many, in turn from each text, with its name.

    Without `count`, of 20 documents or as many as there are. Raises UserError where there are fewer, or none.
    """

    def of(name: str) -> Iterator[tuple[str, torch.Tensor]]:
        for _, text in texts_of(name):
            if len(text) > length:  # a token is a character at least
                ids = tokenizer(text[: 16 * length], truncation=True, max_length=length)["input_ids"]
                if len(ids) == length:
                    yield "/".join(Path(name).parts[-2:]), torch.tensor(ids)

    in_turn = (found for row in itertools.zip_longest(*map(of, texts)) for found in row if found)
    documents = list(itertools.islice(in_turn, 20 if count is None else count))
    if len(documents) < (count or 1):
        raise UserError(
            f"{len(documents)} documents of {length} tokens or more in {', '.join(texts)}; {count or 1} needed: "
            "add text, or lower --documents or --context"
        )
    return documents


def compare(
    base: PreTrainedModel,
    models: Mapping[str, MoHLlamaForCausalLM],
    ids: torch.Tensor,
    presses: Mapping[str, Any] | None,
    others: Mapping[str, MoHLlamaForCausalLM] = MappingProxyType({}),
) -> dict[str, Any]:
    """Per model sums `[5]` over positions between `EDGES` and from `HEADLINE` on, and shares of keys and heads.

    With presses, or an empty dict of them, the bytes of the caches after the prompt and after all tokens, too. The
    presses are those of the base and of the `others`.
    """
    ids = ids[None].to(base.device)
    reference = base.model(ids, use_cache=False).last_hidden_state[0]
    starts = {f"from {start}": start for start in (0, HEADLINE) if start < ids.shape[1]}
    states: dict[str, tuple[PreTrainedModel, torch.Tensor]] = {}
    found: dict[str, dict[str, Any]] = {}

    def row(on: torch.Tensor, sizes: list[int], config: Any, dropped: int = 0) -> dict[str, Any]:
        keys = {of: keys_read(on, config, start, dropped) for of, start in starts.items()}
        spread = on.quantile(torch.tensor([0.05, 0.95])).tolist()  # over tokens
        return {"keys": keys, "heads_on": on.mean().item(), "heads_on_5_95": spread, "bytes": sizes}

    for name, model in models.items():
        cache = None if presses is None else MoHCache(model.config)
        passes, sizes = [], []
        for part in [ids] if presses is None else ids.tensor_split([HEADLINE], dim=1):
            passes.append(hidden_and_gates(model, part, cache))
            sizes += [] if cache is None else [cache_bytes(cache)]
        on = torch.cat([gates for _, gates in passes], dim=1).mean(0)
        states[name] = model, torch.cat([hidden for hidden, _ in passes])
        found[name] = row(on, sizes, model.config)
        for press, kind in (presses or {}).items():
            with_others = {f"{press}+{Path(of).name}": other for of, other in others.items()}
            for own, pressed in {press: base, **with_others}.items():
                plan, on = pressed.config, torch.ones(ids.shape[1])
                if pressed is not base:
                    on[plan.all_heads_until :] = np.mean(plan.active_heads_per_layer) / plan.num_attention_heads
                hidden, sizes_then, dropped = read_pressed(pressed, ids, HEADLINE, sizes[0], kind)
                states[f"{name}/{own}"] = pressed, hidden
                found[f"{name}/{own}"] = row(on, sizes_then, model.config, dropped)
    compared: dict[str, list[torch.Tensor]] = {name: [] for name in states}
    for rows in torch.arange(ids.shape[1] - 1, device=ids.device).split(ROWS):
        log_q = base.lm_head(reference[rows]).float().log_softmax(-1)
        for name, (model, hidden) in states.items():
            log_p = model.lm_head(hidden[rows]).float().log_softmax(-1)
            compared[name].append(compare_predictions(log_p, log_q, ids[0, rows + 1]))
    for name, values in ((name, torch.cat(own).cpu()) for name, own in compared.items()):
        parts = {f"{low}": (low, high) for low, high in itertools.pairwise(EDGES) if low < len(values)}
        parts["headline"] = (HEADLINE, len(values))
        found[name]["sums"] = {
            part: [len(values[low:high]), *values[low:high].sum(0).tolist()]
            for part, (low, high) in parts.items()
            if len(values[low:high])
        }
    return found


def hidden_and_gates(
    model: MoHLlamaForCausalLM, ids: torch.Tensor, cache: Cache | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden states `[T, C]`, and the share of heads that each layer has on `[layers, T]`.

    With a `cache`, `ids` `[1, T]` come after the tokens that it has, and are added to it.
    """
    before = 0 if cache is None else cache.get_seq_length()
    gates: list[torch.Tensor] = []

    def keep(router: Any, args: Any, output: Any) -> None:
        gates.append(output[1][0].ne(0).float().mean(-1))

    with ExitStack() as hooks:
        for router in model.routers:
            hooks.enter_context(router.register_forward_hook(keep))
        hidden = model.model(ids, past_key_values=cache, use_cache=cache is not None).last_hidden_state[0]
    on = torch.stack(gates).cpu()
    if model.config.head_fallback == "local":
        on[:, : max(0, model.config.all_heads_until - before)] = 1
    return hidden, on


def keys_read(on: torch.Tensor, config: Any, start: int = 0, dropped: int = 0) -> float:
    """Share of the keys of dense attention that are read from position `start` on, by the share of heads `on` `[T]`.

    From `HEADLINE` on heads that are on have `dropped` keys less.
    """
    every = torch.arange(1, len(on) + 1, dtype=torch.float64)
    fallback = every.clamp_max(config.local_window + config.local_sinks) * (config.head_fallback == "local")
    read = on.double() * (every - dropped * (every > HEADLINE)) + (1 - on.double()) * fallback
    return (read[start:].sum() / every[start:].sum()).item()


def logits_at(model: PreTrainedModel, ids: list[int], positions: list[int]) -> torch.Tensor:
    """The logits `[P, V]` after these positions of a prompt."""
    hidden = model.model(torch.tensor([ids], device=model.device), use_cache=False).last_hidden_state
    return model.lm_head(hidden[0, positions])


def print_positions(rows: Sequence[dict[str, Any]], names: Sequence[str], context: int) -> None:
    by_text = ", ".join(f"{sum(r['text'] == t for r in rows)} of {t}" for t in dict.fromkeys(r["text"] for r in rows))
    print(f"\n{len(rows)} documents of {context} tokens: {by_text}")
    heads, keys = "heads on (5-95 % of tokens)", "keys (least-most document)"
    print(f"{'model':<24} {heads} {keys} {'positions':>14} {'x base (95 %)':>28} {'KL (95 %)':>28}")
    for name in names:
        found = [row[name] for row in rows]
        low, high = np.mean([row["heads_on_5_95"] for row in found], axis=0)
        heads_on = f"{np.mean([row['heads_on'] for row in found]):.3f} ({low:.3f}-{high:.3f})"
        for part in found[0]["sums"]:
            figures = Comparison(np.array([row["sums"][part] for row in found]))
            low = HEADLINE if part == "headline" else int(part)
            high = min([edge for edge in EDGES if edge > low] + [context])
            positions = f"from {low} on" if part == "headline" else f"{low}-{high - 1}"
            share = ""
            if part in ("headline", "0"):
                read = [row["keys"][f"from {low}"] for row in found]
                share = f"{np.mean(read):.3f} ({min(read):.3f}-{max(read):.3f})"
            times = show_figure(figures.perplexity_ratio, figures.ratio_interval, ".4f")
            kl = show_figure(figures.kl, figures.kl_interval, ".4f")
            print(f"{Path(name).name[-24:]:<24} {heads_on:>27} {share:>26} {positions:>14} {times:>28} {kl:>28}")


def print_retrieval(
    task: str, prompts: list[dict[str, Any]], names: Sequence[str], distances: Sequence[int], far: Sequence[int]
) -> None:
    """A row per model: right answers over the base's at each distance, and at all those beyond the window."""
    columns = {str(distance): [distance] for distance in distances} | {"beyond the window": far}
    print(f"\n{task}, {len(prompts)} prompts: the base's accuracy, and right answers / the base's (95 %)")
    print(f"{'distance':<24}" + "".join(f"{column:>26}" for column in columns))

    def sums(name: str, wanted: Sequence[int]) -> np.ndarray:
        """Right answers, all, and their log-probability, of each prompt, `[P, 3]`."""
        return np.array([np.sum([row[name][task][str(distance)] for distance in wanted], axis=0) for row in prompts])

    base = {column: sums("base", wanted) for column, wanted in columns.items() if wanted}
    print(f"{'base':<24}" + "".join(f"{b[:, 0].sum() / b[:, 1].sum():>26.3f}" for b in base.values()))
    for name in names:
        cells = [show_figure(*ratio(sums(name, columns[column]), of_base), ".3f") for column, of_base in base.items()]
        print(f"{Path(name).name[-24:]:<24}" + "".join(f"{cell:>26}" for cell in cells))


def ratio(own: np.ndarray, base: np.ndarray) -> tuple[float | None, list[float] | None]:
    """Right answers, a column of `[P, 3]`, over the base's, 95 % interval by bootstrap over prompts; None: none."""
    if not base[:, 0].sum():
        return None, None
    draws = np.random.default_rng(0).multinomial(len(own), np.full(len(own), 1 / len(own)), 2000)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = (draws @ own[:, 0]) / (draws @ base[:, 0])
    ends = np.percentile(ratios[np.isfinite(ratios)], (2.5, 97.5)).tolist() if len(own) > 1 else None
    return own[:, 0].sum() / base[:, 0].sum(), ends


if __name__ == "__main__":
    sys.exit(main())
