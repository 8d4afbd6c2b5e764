"""What the sections of a model's card say, as pairs and rows: head plan, cost, recipe, text, recovery."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.flops import forward_flops
from moh_llm.hub.lineage import Lineage, is_hub_id
from moh_llm.hub.markdown import Safe, code
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.reading import read_json
from moh_llm.records.conversion import Conversion, last_component
from moh_llm.records.lineage import REFERENCES, ConversionEntry, ReferenceKind, RunEntry
from moh_llm.records.lineage import mixture_name as named
from moh_llm.reporting.runs import Record, TrainingRun

Pairs = list[tuple[str, Any]]

LENGTHS = (512, 2048, 8192)
# Rows of a table of sources, and of a curve; the records hold all of them.
_SOURCES, _SCORES = 40, 12
_ROUTERS = {
    "query_norm": "`query_norm`: by the l2 norm of the heads' queries, without weights",
    "linear": "`linear`: by a linear map of the layer's input",
    "two_stage": "`two_stage`: the paper's, which also weighs shared against routed heads (Eq. 5 and 6)",
}
_SCORE_WORDS = {
    "quantized": "`quantized`: a head that is on counts in full",
    "weighted": "`weighted`: a head that is on counts by its score",
}
_UNITS = {
    "head": "`head`: a token has each routed head on or off by itself",
    "kv_group": "`kv_group`: the heads that share one key-value head are on or off as one",
}
_FALLBACKS = {
    "none": "none: a head that is off adds nothing",
    "value": "`value`: a fixed vector and a share of the token's own value in place of a head that is off",
}


def head_plan(config: MoHLlamaConfig, conversion: Conversion | None) -> Pairs:
    """Which heads are on, and by what rule; the plan's preset where a conversion had one."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    active = config.active_heads_per_layer
    pairs: Pairs = [
        ("layers", layers),
        ("query heads per layer", f"{heads} ({config.num_key_value_heads} of keys and values)"),
        ("shared heads (always on)", _shared(config)),
        ("active heads per token, mean over layers", f"{_mean_active(config):.4g} ({share_active(config):.1%})"),
        ("active heads by layer", "the same in each" if len(set(active)) == 1 else Safe(_by_layer(active))),
        ("router", Safe(_ROUTERS[config.router_type])),
        ("routing granularity", Safe(_UNITS[config.routing_granularity])),
        ("score", Safe(_SCORE_WORDS[config.router_score])),
        ("fallbacks", Safe(_FALLBACKS[config.head_fallback])),
    ]
    if conversion and conversion.plan and conversion.plan.preset:
        pairs.append(("preset", code(conversion.plan.preset)))
    if conversion and conversion.arithmetic:
        parameters = conversion.arithmetic.parameters
        added = parameters.moh - parameters.dense
        pairs.append(("parameters", f"{parameters.dense:,} of the base and {added:,} for routing"))
    return pairs


def share_active(config: MoHLlamaConfig) -> float:
    """Share of the heads that a token uses, mean over layers."""
    return _mean_active(config) / config.num_attention_heads


def costs(config: MoHLlamaConfig) -> list[tuple[int, int, int]]:
    """Theoretical FLOPs of a forward pass by length: with every head on, and as MoH."""
    return [(length, forward_flops(config, length, dense=True), forward_flops(config, length)) for length in LENGTHS]


def recipe(run: TrainingRun) -> Pairs:
    """How a run trained, from its recipe and its log."""
    given, last = run.recipe, run.lines[-1]
    data, objective, optimizer, schedule = (given[key] for key in ("data", "objective", "optimizer", "schedule"))
    batch = f"{data['batch_size']} blocks of {data['sequence_length']:,} tokens"
    warmup = "1 step" if schedule["warmup_steps"] == 1 else f"{schedule['warmup_steps']:,} steps"
    router_rate = optimizer["router_learning_rate"] or optimizer["learning_rate"]
    pairs: Pairs = [
        ("objective", _objective(objective["kind"], run.reference)),
        ("tokens", f"{run.tokens_of(last):,}"),
        ("steps", f"{last['step']:,} of {given['max_steps']:,}, each {batch}"),
        ("weights trained", _adapters(given["lora"])),
        ("highest learning rate", f"{optimizer['learning_rate']:g}, of the routers {router_rate:g}"),
        ("schedule", f"{warmup} of warm-up, then cosine to {schedule['final_learning_rate']:g}"),
        ("AdamW", f"betas {_listed(optimizer['betas'])}, weight decay {optimizer['weight_decay']:g}"),
    ]
    if optimizer["max_grad_norm"] is not None:
        pairs.append(("gradients clipped to norm", f"{optimizer['max_grad_norm']:g}"))
    if objective["kind"] == "distillation":
        layer = objective["layer_coefficient"]
        extra = f", layers' distance weighed {layer:g}" if layer else ""
        pairs.append(("distillation", f"temperature {objective['temperature']:g}{extra}"))
    beta = objective["balance_coefficient"]
    pairs.append(("load-balance weight", Safe("the model's `router_aux_loss_coef`" if beta is None else f"{beta:g}")))
    if schedule["anneal_steps"]:
        pairs.append(("heads switched off over", f"{schedule['anneal_steps']:,} steps"))
    if run.dropped:
        pairs.append(("steps dropped as diverging", f"{len(run.dropped):,}"))
    pairs += [("precision", given["mixed_precision"].replace("no", "float32")), ("seed", run.seed)]
    if device := run.record.get("device"):
        processes = run.record.get("processes") or 1
        pairs.append(("device", f"{device}, {processes} process{'es' if processes > 1 else ''}"))
    return pairs


def mixture_name(run: TrainingRun) -> str:
    """A mixture as its file or folder is called."""
    return named(run.recipe["data"]["mixture"])


def history(lineage: Lineage) -> list[Record]:
    """What was done to the weights, oldest first, as rows of a table; runs are numbered."""
    rows: list[Record] = []
    gaps, number = lineage.chain.unrecorded(), 0
    for position, entry in enumerate(lineage.chain.entries):
        row: Record = {"unrecorded": position in gaps, "tokens": None, "steps": None, "mixture": None, "seed": None}
        if isinstance(entry, ConversionEntry):
            rows.append(row | {"what": "conversion", "how": f"of {entry.base}"})
            continue
        number += 1
        # A chain that begins with a run is that of a model from scratch, or lacks what came before.
        row["unrecorded"] |= position == 0 and lineage.conversion is not None
        of_run = {"tokens": entry.tokens, "steps": entry.steps, "mixture": entry.mixture, "seed": entry.seed}
        rows.append(row | of_run | {"what": f"run {number}", "how": _how(entry)})
    return rows


def _how(entry: RunEntry) -> str:
    weights = "all weights" if entry.lora_rank is None else f"LoRA of rank {entry.lora_rank}"
    return f"{_objective(entry.objective, entry.teacher or 'start')}; {weights}"


def _objective(kind: str, teacher: ReferenceKind) -> str:
    """An objective in words."""
    words = {
        "distillation": f"distillation, teacher: {REFERENCES[teacher]}",
        "cross_entropy": "cross-entropy on the text",
    }
    return words.get(kind, kind)


def receipt(run: TrainingRun) -> list[tuple[str, Record]]:
    """What was read of each source, most first; beyond a screenful the others are summed up. Empty until the end."""
    read = run.record.get("data_read") or {}
    ranked = sorted(read.items(), key=lambda item: -item[1]["tokens"])
    rows = [(last_component(name), entry) for name, entry in ranked[:_SOURCES]]
    if others := [entry for _, entry in ranked[_SOURCES:]]:
        summed = {key: sum(entry[key] for entry in others) for key in ("weight", "share", "tokens", "repeated_tokens")}
        rows.append((f"{len(others):,} others", summed | {"epochs": None}))
    return rows


def hub_datasets(run: TrainingRun | None) -> list[str]:
    """Ids of the Hub datasets that training read, by the record of the tokens it read them from, if that is here."""
    folder = run.record.get("tokens_in") if run else None
    if run is None or not folder or not (Path(folder) / "mixture.json").is_file():
        return []
    try:
        sources = read_json(Path(folder) / "mixture.json")["sources"]
        read = [name for name, entry in (run.record.get("data_read") or {}).items() if entry["tokens"]]
        files = [part["file"] for name in read for part in sources[name]["text"]]
    except (UserError, KeyError, TypeError):  # of another mixture since, or of an older version
        return []
    found = [re.match(r"hf://datasets/([^/@]+/[^/@]+)", file) for file in files]
    return list(dict.fromkeys(match[1] for match in found if match and is_hub_id(match[1])))


def curve(run: TrainingRun) -> list[Record]:
    """Scores on held-out text over training, thinned out to a small table, the saved model's last."""
    scores = run.scores
    if len(scores) > _SCORES:
        kept = {round(index * (len(scores) - 1) / (_SCORES - 1)) for index in range(_SCORES)}
        scores = [scores[index] for index in sorted(kept)]
    return scores + ([run.saved_score | {"saved": True}] if run.saved_score else [])


def _mean_active(config: MoHLlamaConfig) -> float:
    return sum(config.active_heads_per_layer) / config.num_hidden_layers


def _shared(config: MoHLlamaConfig) -> str:
    """Shared heads by their ids where all layers have the same, else by their number."""
    ids = config.shared_heads_per_layer
    if not any(ids):
        return "none"
    if all(layer == ids[0] for layer in ids):
        return f"{len(ids[0])} per layer: head {_spans(ids[0])}"
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


def _adapters(lora: Record | None) -> str:
    return "all" if lora is None else f"LoRA adapters of rank {lora['rank']}, merged, and the routers"


def _listed(values: Sequence[float]) -> str:
    return " and ".join(f"{value:g}" for value in values)
