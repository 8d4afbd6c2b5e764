"""Time of converted models over their dense base's: prefill and decoding, the whole model and its attention alone.

    python benchmarks/speed.py BASE --models out/half out/fixed --text long1.jsonl --lengths 2048 8192
    python benchmarks/speed.py --layer llama3-8b --lengths 2048 8192 --batch 1

Models take turns in each round; a ratio is the median over rounds of time / the base's in the same round, with the
least and the most. "attention" is what layers take beyond their linear projections. Decoding is one token per row after
as many as `--lengths` says; models take a `MoHCache`, and the base a static cache. The base is timed with transformers'
SDPA attention, and in decoding also with one that reads keys once for all heads of a group; ratios are to the faster.
Models decode a second time with all heads on ("all on"), after the same prompt in a static cache.
Keys read: share of the base's keys that attention needs in this text, in prefill over all positions, in decoding at the
last one. KL: nats per token to the base from position 2,048 on, of the first row. Cache: MiB of one row's. `--layer`
makes one layer with random weights instead, without KL: half of the heads fixed, and half routed.
"""

import argparse
import copy
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command import add_compute_dtype, cache_bytes, device_and_dtype, load_models, now, status_of
from long_context import HEADLINE, ROWS, compare, hidden_and_gates, keys_read
from torch import nn
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoTokenizer,
    Cache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from moh_llm import MoHCache
from moh_llm.attention import choose_for
from moh_llm.data.mixture import mixture_from_files
from moh_llm.data.records import source_documents
from moh_llm.devices import name_device
from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM

LAYERS = {  # heads, key-value heads, head size, width, width of the feed-forward network
    "llama3-8b": (32, 8, 128, 4096, 14336),
    "smollm2-135m": (9, 3, 64, 576, 1536),
}
PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj"
GROUPED = "grouped_decoding"
SHOWN = ("keys", 3), ("kl", 4), ("cache_mib", 1)
LINE = "{:<28} {:<8}{:>7}{:>5}{:>10}{:>26}{:>26}{:>8}{:>9}{:>8}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="the dense model")
    parser.add_argument("--models", nargs="+", default=[], help="converted folders")
    parser.add_argument("--text", nargs="+", help="text files with long documents")
    parser.add_argument("--layer", choices=LAYERS, help="one layer of this shape with random weights, and no base")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="rows")
    parser.add_argument("--passes", nargs="+", choices=["prefill", "decode"], default=["prefill", "decode"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of decoding in a round")
    add_compute_dtype(parser)
    args = parser.parse_args()
    if bool(args.layer) == bool(args.base) or (args.base and not (args.models and args.text)):
        parser.error("give a BASE with --models and --text, or --layer alone")
    return status_of(run, args)


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    models = (layer_models if args.layer else real_models)(args, device, dtype)
    chosen = [choose_for(device, dtype, models["base"].config.head_dim, length=length).name for length in (256, 1)]
    print(f"{name_device(device)}; torch {torch.__version__}; {computed}; {args.rounds} rounds; ", end="")
    print(f"attention of a prefill by {chosen[0]}, of a step by {chosen[1]}")
    ratios = "x base (least to most)", "attention (least to most)"
    print(LINE.format("model", "pass", "tokens", "rows", "ms", *ratios, "keys", "KL", "cache"))
    for length, batch in itertools.product(args.lengths, args.batch):
        ids = tokens(args, length + args.steps, batch).to(device)
        for name in args.passes:
            for row in measure(name, models, ids, length, args):
                show(row)


def real_models(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """The base, and converted models by the names of their folders. Raises UserError where two have one name."""
    labels = ["base", *(Path(name).name for name in args.models)]
    if len({*labels}) < len(labels):
        raise UserError(f"rows are named after folders, and two are called the same: {', '.join(labels)}; rename one")
    dense, converted = load_models(args.base, args.models, device, dtype)
    return dict(zip(labels, [dense, *converted.values()], strict=True))


def layer_models(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """The dense layer, and the layer with half of the heads: always on, by groups or by heads, and routed likewise."""
    heads, groups, size, width, inner = LAYERS[args.layer]
    shape = {
        **{"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": size, "hidden_size": width},
        **{"intermediate_size": inner, "num_hidden_layers": 1, "vocab_size": 1024, "max_position_embeddings": 1 << 17},
    }
    per_group = heads // groups
    fixed = groups // 2 * per_group
    plans = {
        "fixed groups": {"num_shared_heads": fixed, "num_active_heads": fixed, "router_type": "none"},
        "fixed heads": {"num_shared_heads": heads // 2, "num_active_heads": heads // 2, "router_type": "none"},
        "routed": {"num_shared_heads": 0, "num_active_heads": heads // 2, "router_type": "linear"},
        "routed by groups": {"num_shared_heads": 0, "num_active_heads": fixed, "router_type": "linear"}
        | {"routing_granularity": "kv_group"},
    }
    torch.manual_seed(0)
    found: dict[str, PreTrainedModel] = {"base": LlamaForCausalLM(LlamaConfig(**shape))}
    for plan, fields in plans.items():
        found[plan] = MoHLlamaForCausalLM(MoHLlamaConfig(**shape, **fields, head_fallback="local"))
    return {name: model.to(device, dtype).eval() for name, model in found.items()}


def tokens(args: argparse.Namespace, length: int, batch: int) -> torch.Tensor:
    """Ids `[batch, length]`: from the beginning of a long document on, or random ones for `--layer`."""
    if args.layer:
        return torch.randint(0, 1024, (batch, length), generator=torch.Generator().manual_seed(0))
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    ids: list[int] = []
    for name in args.text:
        for source in mixture_from_files([name]).sources:
            for _, text in source_documents(source):
                if ids or len(text) > 4 * length:
                    ids += tokenizer(text[: 16 * length * batch])["input_ids"]
                if len(ids) >= length * batch:
                    return torch.tensor(ids[: length * batch]).view(batch, length)
    raise UserError(f"{', '.join(args.text)} hold fewer than {length * batch} tokens from a long document on; add text")


def measure(
    name: str, models: dict[str, PreTrainedModel], ids: torch.Tensor, length: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row per model of one pass, `prefill` or `decode`."""
    peers = {peer: (model, nullcontext) for peer, model in models.items()}
    if name == "decode":
        base, *converted = models.items()
        all_on = {f"{peer}, all on": (model, model.all_heads_active) for peer, model in converted}
        grouped = {"base, keys read once": (base[1], partial(reading_once, base[1]))}
        peers = {"base": peers["base"]} | grouped | peers | all_on
    seconds: dict[str, list[tuple[float, float]]] = {peer: [] for peer in peers}
    prompt, steps = ids[:, :length], ids[:, length:]
    caches = {}
    for peer, (model, _) in peers.items() if name == "decode" else ():
        is_plan = peer in models and peer != "base"
        caches[peer] = MoHCache(model.config) if is_plan else StaticCache(model.config, max_cache_len=ids.shape[1])
        model(prompt[:1], past_key_values=caches[peer], logits_to_keep=1)
    for number in tqdm(range(args.rounds + 1), desc=f"{name} {length} x {len(ids)}", leave=False):
        for peer, (model, context) in peers.items():
            with context():
                times = decode(model, caches[peer], steps) if caches else prefill(model, prompt)
            if number:  # the first warms up
                seconds[peer].append(times)
    dense = [min(times) for times in zip(*(seconds[peer] for peer in peers if peer.startswith("base")), strict=True)]
    rows = []
    for peer, (model, context) in peers.items():
        row: dict[str, Any] = {"model": peer, "pass": name, "tokens": length, "rows": len(ids)}
        row["ms"] = 1e3 * statistics.median(whole for whole, _ in seconds[peer])
        ratios = [
            (whole / base[0], attention / base[1])
            for (whole, attention), base in zip(seconds[peer], dense, strict=True)
        ]
        for kind, values in zip(("whole", "attention"), zip(*ratios, strict=True), strict=True):
            row[kind] = [statistics.median(values), min(values), max(values)]
        if caches:
            row["cache_mib"] = cache_bytes(caches[peer]) / 2**20
        if isinstance(model, MoHLlamaForCausalLM):
            with context():
                gates = hidden_and_gates(model, ids[:1, :length])[1]
            row["keys"] = keys_read(gates.mean(0), model.config, length - 1 if name == "decode" else 0)
            known = HEADLINE + ROWS <= length <= model.config.max_position_embeddings
            if known and name == "prefill" and not args.layer:
                sums = compare(models["base"], {peer: model}, ids[0, :length], None)[peer]["sums"]["headline"]
                row["kl"] = sums[3] / sums[0]
        rows.append(row)
    return rows


@contextmanager
def reading_once(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a dense model's decoding reads keys once for all heads of a group."""
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@contextmanager
def attention_clock(layers: Sequence[nn.Module]) -> Iterator[list[float]]:
    """One number that grows by the seconds that the layers' attention takes beyond its linear projections."""
    clock, handles = [0.0], []

    def add(sign: int) -> Any:
        def hook(*_: Any) -> None:
            clock[0] += sign * now()

        return hook

    for layer in layers:
        for sign, module in [(1, layer.self_attn), *((-1, getattr(layer.self_attn, name)) for name in PROJECTIONS)]:
            handles.append(module.register_forward_pre_hook(add(-sign)))
            handles.append(module.register_forward_hook(add(sign)))
    try:
        yield clock
    finally:
        for handle in handles:
            handle.remove()


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of a prefill, and of its attention."""
    with attention_clock(model.model.layers) as clock:
        begin = now()
        model(ids, use_cache=True, logits_to_keep=1)
        return now() - begin, clock[0]


def decode(model: PreTrainedModel, prompt: Cache, ids: torch.Tensor) -> tuple[float, float]:
    """Seconds of a step of decoding after a prompt that is the same in each row, the median, and of its attention."""
    cache = copy.deepcopy(prompt)
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            layer.keys, layer.values = (part.repeat_interleave(len(ids), 0) for part in (layer.keys, layer.values))
            layer.max_batch_size = len(ids)
        else:
            layer.batch_repeat_interleave(len(ids))
    found = []
    for step in ids.T:
        with attention_clock(model.model.layers) as clock:
            begin = now()
            model(step[:, None], past_key_values=cache)
            found.append((now() - begin, clock[0]))
    return sorted(found)[len(found) // 2]


def grouped_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
):
    """Attention of one query per row that reads keys once for the heads of a group."""
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    own = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(own, key, value, attn_mask=mask, scale=kwargs["scaling"])
    return out.reshape(len(query), 1, -1, query.shape[-1]), None


def show(row: dict[str, Any]) -> None:
    ratios = [f"{value[0]:.3f} ({value[1]:.3f} to {value[2]:.3f})" for value in (row["whole"], row["attention"])]
    known = [f"{row[name]:.{digits}f}" if name in row else "" for name, digits in SHOWN]
    print(LINE.format(row["model"][-28:], row["pass"], row["tokens"], row["rows"], f"{row['ms']:.1f}", *ratios, *known))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
