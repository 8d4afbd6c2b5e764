"""Tables that only a model's card has: head plan, proof of the conversion, cost, lineage; and its datasets."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moh_llm.claims.conversion import parameters_added
from moh_llm.claims.heads import all_on
from moh_llm.claims.training import entry_names, weights_changed
from moh_llm.errors import UserError
from moh_llm.evaluation.rendering import Table, facts
from moh_llm.evaluation.run_tables import objective
from moh_llm.evaluation.runs import TrainingRun
from moh_llm.flops import forward_flops, stated_lengths
from moh_llm.hub.lineage import Lineage, is_hub_id
from moh_llm.intervals import show_figure, show_number
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import Conversion, Verification
from moh_llm.records.lineage import ConversionEntry
from moh_llm.records.tokens import TokensRecord

_ROUTERS = {
    "query_norm": "by the l2 norm of the heads' queries, without weights",
    "linear": "by a linear map of the layer's input",
    "threshold": "by a linear map of the layer's input; the heads whose score is above zero, whatever their number",
    "none": "the shared heads alone are on",
    "two_stage": "the paper's, which also weighs shared against routed heads (Eq. 5 and 6)",
}
_SCORE_WORDS = {
    "quantized": "a head that is on counts in full",
    "weighted": "a head that is on counts by its score",
}
_UNITS = {
    "head": "a token has each routed head on or off by itself",
    "kv_group": "the heads that share one key-value head are on or off as one",
}
_FALLBACKS = {
    "none": "a head that is off adds nothing",
    "local": "a head that is off attends to the document's first {sinks:,} tokens, to the last {window:,}, and to one "
    "fitted token for all others",
    "value": "a fixed vector and a share of the token's own value in place of a head that is off",
}


def head_plan(config: MoHLlamaConfig, conversion: Conversion | None) -> Table:
    """Which heads are on, and by what rule; the plan's preset where a conversion had one."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    active = config.active_heads_per_layer
    pairs: list[tuple[str, str]] = [
        ("layers", str(layers)),
        ("query heads per layer", f"{heads} ({config.num_key_value_heads} of keys and values)"),
        ("shared heads (always on)", _shared(config)),
        ("heads asked for per token, mean over layers", f"{_mean_active(config):.4g} ({share_active(config):.1%})"),
        ("heads asked for by layer", "the same in each" if len(set(active)) == 1 else _by_layer(active)),
    ]
    after = ""
    if start := all_on(config):
        pairs.append(("first tokens of a document, with all heads on", f"{start:,}"))
        after = " after these first tokens"
    if any(never := _never_on(config)):
        number = f"{never[0]} per layer" if len(set(never)) == 1 else _by_layer(never)
        pairs.append((f"heads that are never on{after}", number))
    router = config.router_type if routes(config) else "none"
    pairs.append(("router", f"{config.router_type}: {_ROUTERS[router]}{after if router == 'none' else ''}"))
    if routes(config):
        pairs.append(("routing granularity", _named(_UNITS, config.routing_granularity)))
        pairs.append(("score", _named(_SCORE_WORDS, config.router_score)))
    meaning = _named(_FALLBACKS, config.head_fallback)
    pairs.append(("fallbacks", meaning.format(sinks=config.local_sinks, window=config.local_window)))
    if conversion and conversion.plan and conversion.plan.preset:
        pairs.append(("preset", conversion.plan.preset))
    if conversion and (added := conversion.vocabulary):
        pairs.append(("tokens", f"{added.new_tokens:,} added to those of the base, by tokenizer {added.tokenizer}"))
    if conversion and conversion.arithmetic:
        pairs.append(("parameters", parameters_added(conversion.arithmetic.parameters).text))
    return facts(pairs)


def share_active(config: MoHLlamaConfig) -> float:
    """Share of the heads that the plan asks for, mean over layers."""
    return _mean_active(config) / config.num_attention_heads


def costs(config: MoHLlamaConfig, context: int | None) -> Table:
    """Theoretical FLOPs of a forward pass by length: with every head on, and with those that the plan asks for.

    ``context``: the conversion's.
    """
    rows = []
    for length in stated_lengths(config, context):
        dense, moh = forward_flops(config, length, dense=True), forward_flops(config, length)
        rows.append([f"{length:,}", f"{dense:.3e}", f"{moh:.3e}", f"{moh / dense:#.4g}"])
    return Table(["tokens", "every head on", "heads asked for", "ratio"], rows, text=0)


def measured_costs(analysis: Mapping[str, Any]) -> Table | None:
    """Time of a forward pass by length, with every head on and as MoH, where an evaluation measured it."""
    rows = [
        [f"{cost['length']:,}", f"{cost['dense']:.3g} s", f"{cost['moh']:.3g} s", f"{cost['moh'] / cost['dense']:.3f}"]
        for cost in analysis.get("seconds", [])
    ]
    return Table(["tokens", "every head on", "heads as routed", "ratio"], rows, text=0) if rows else None


def proof(found: Verification) -> Table:
    """How near the model as converted is to its base."""
    figures = found.converted
    row = [
        "the converted model",
        show_number(figures.perplexity, "#.5g"),
        show_figure(figures.perplexity_ratio, figures.ratio_interval, "#.5g"),
        show_figure(figures.kl, figures.kl_interval, "#.3g"),
        show_number(figures.top1_agreement, ".2%"),
    ]
    return Table(["", "perplexity", "ratio to base's", "KL to base, nats", "same top-1"], [row])


def history(lineage: Lineage) -> Table:
    """History of the weights, oldest first, runs numbered."""
    rows: list[list[str]] = []
    last = lineage.run and lineage.run.record.parameters  # of the last entry's run; those of others are not at hand
    for name, entry in zip(entry_names(lineage.chain), lineage.chain.entries, strict=True):
        if isinstance(entry, ConversionEntry):
            added = f", {entry.new_tokens:,} tokens added" if entry.new_tokens else ""
            rows.append([name, f"of {entry.base}{added}", "-", "-", "", ""])
        else:
            changed = weights_changed(entry, last if entry is lineage.chain.entries[-1] else None)
            how = f"{objective(entry.objective, entry.teacher or 'start')}; {changed.text}"
            size = [f"{entry.tokens:,}", f"{entry.steps:,}", entry.mixture, str(entry.seed)]
            rows.append([name, how, *size])
    return Table(["", "how", "tokens", "steps", "mixture", "seed"], rows, text=2)


def hub_datasets(run: TrainingRun | None) -> list[str]:
    """Ids of the Hub datasets that training read, by the record of the tokens it read them from, if that is here."""
    folder = run.record.tokens_in if run else None
    if run is None or not folder:
        return []
    try:
        sources = TokensRecord.of_folder(Path(folder)).sources
        read = [name for name, entry in (run.record.data_read or {}).items() if entry["tokens"]]
        files = [part.file for name in read for part in sources[name].text]
    except (UserError, KeyError, TypeError):  # gone, of another mixture since, or of an older version
        return []
    found = [re.match(r"hf://datasets/([^/@]+/[^/@]+)", file) for file in files]
    return list(dict.fromkeys(match[1] for match in found if match and is_hub_id(match[1])))


def routes(config: MoHLlamaConfig) -> bool:
    """Whether some layer has a router that chooses heads."""
    return config.router_type != "none" and any(map(config.routed_heads, range(config.num_hidden_layers)))


def _never_on(config: MoHLlamaConfig) -> list[int]:
    """Per layer, heads that no token has on, apart from first tokens that have all."""
    if config.router_type == "none":
        return [config.num_attention_heads - len(shared) for shared in config.shared_heads_per_layer]
    return [len(heads) for heads in config.never_on_heads_per_layer]


def _named(meanings: dict[str, str], name: str) -> str:
    """An option's value and what it means."""
    return f"{name}: {meanings[name]}"


def _mean_active(config: MoHLlamaConfig) -> float:
    return sum(config.active_heads_per_layer) / config.num_hidden_layers


def _shared(config: MoHLlamaConfig) -> str:
    """Shared heads by their ids where all layers have the same, else by their number."""
    ids = config.shared_heads_per_layer
    if not any(ids):
        return "none"
    if all(layer == ids[0] for layer in ids):
        return f"{len(ids[0])} per layer: {'head' if len(ids[0]) == 1 else 'heads'} {_spans(ids[0])}"
    numbers = [len(layer) for layer in ids]
    if len(set(numbers)) == 1:
        return f"{numbers[0]} per layer, others in each (config.json)"
    return f"{_by_layer(numbers)} (config.json)"


def _by_layer(values: Sequence[int]) -> str:
    """``layers 0 to 2: 9; layer 3: 7``."""
    parts, start = [], 0
    for value, group in itertools.groupby(values):
        end = start + len(list(group)) - 1
        parts.append(f"{f'layer {start}' if start == end else f'layers {start} to {end}'}: {value}")
        start = end + 1
    return "; ".join(parts)


def _spans(ids: Sequence[int]) -> str:
    """``0 to 15, 20``."""
    spans: list[list[int]] = []
    for number in ids:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
