"""Sections on training runs for reports and model cards: recipe, text read, held-out scores, comparison."""

import json
from collections.abc import Sequence
from typing import Any

from moh_llm.claims.training import floor_of_kl, saved_model, scored_text, weights_trained
from moh_llm.evaluation.document import Block, Caution, Code, Details, Inline, Paragraph, Table, facts
from moh_llm.evaluation.groups import Group, compare, differences, reference_words, same_held_out_text
from moh_llm.evaluation.runs import Record, TrainingRun, summarise
from moh_llm.intervals import show_error, show_figure, show_number
from moh_llm.records.lineage import REFERENCES, ReferenceKind, in_words

Pairs = list[tuple[str, Inline]]
_OTHER_TEXT = "The runs were not scored on the same held-out text: compare only ratios, and with care."
_NO_SCORES = "Not measured: the run scored no held-out text."
# Dropped steps that are listed one by one.
_LISTED = 10


def comparison(groups: Sequence[Group]) -> list[Block]:
    """Groups of runs, the keys in which they differ, and their scores at equal numbers of tokens."""
    keys = differences(groups)
    rows = [
        [group.name, ", ".join(run.name for run in group.runs), ", ".join(str(run.seed) for run in group.runs)]
        + [_short(by_group[group.name]) for by_group in keys.values()]
        for group in groups
    ]
    blocks: list[Block] = [Table(["group", "runs", "seeds", *keys], rows, text=3 + len(keys))]
    if len(groups) > 1:
        about = "The columns after the seeds are the recipe keys that differ; those that change no curve are left out."
        blocks.append(Paragraph(about if keys else "The groups have the same recipe, model, text and seed."))
    if not same_held_out_text([run for group in groups for run in group.runs]):
        blocks.append(Caution(_OTHER_TEXT))
    body = []
    for row in compare(groups):
        tokens = f"{row['tokens']:,}" + (" (saved)" if row["saved_model"] else "")
        for name, found in row["groups"].items():
            figures = [
                show_number(found["documents"], ","),
                _spread(found["ratio"], "#.5g", found["ratio_interval"]),
                _spread(found["kl"], "#.3g", found["kl_interval"]),
                _spread(found["top1_agreement"], ".2f", factor=100),
                _spread(found["perplexity"], "#.5g"),
            ]
            body.append([tokens, name, str(found["n"]), *figures])
    if not body:
        return [*blocks, Paragraph("No two runs have a score at the same number of tokens.")]
    head = ["tokens", "group", "runs", "documents", "ratio", "KL", "same top-1 %", "perplexity"]
    note = (
        f"Ratio of perplexities and KL: to {reference_words(groups)[0]}. Mean ± standard deviation over the runs of a "
        "group; of a single run, in brackets, the 95 % interval over the held-out documents; (saved): the saved "
        "models, as they stand on disk."
    )
    return [*blocks, Table(head, body, text=2), Paragraph(note)]


def run_blocks(run: TrainingRun) -> list[Block]:
    """The facts, the scores and the receipt of one run."""
    found, speeds = summarise(run), run.points("timing.tokens_per_second")[1]
    status = found["status"]
    pairs: Pairs = [
        ("folder", Code(found["folder"])),
        ("status", status if status == "finished" else f"{status}: not finished, or stopped before its end"),
        ("model", Code(found["model"])),
        ("mixture", (f"{name}, ", Code(found["mixture"])) if (name := run.record.mixture) else Code(found["mixture"])),
        *recipe(run),
        ("seconds of training", f"{found['seconds']:,.1f}"),
    ]
    if speeds:
        pairs.append(("tokens per second (median)", f"{found['tokens_per_second']:,.5g}"))
    if found["loss"]:
        losses = [f"{which} {at['loss']:.4g} (step {at['step']:,})" for which, at in found["loss"].items()]
        pairs.append(("loss", ", ".join(losses)))
    if run.cut:
        pairs.append(("log", "the last line was cut short and is left out"))
    read = receipt(run)
    return [facts(pairs), *held_out(run), *([Details("Receipt: the text that was read", [read])] if read else [])]


def recipe(run: TrainingRun) -> Pairs:
    """How a run trained, from its recipe and its log."""
    given, last = run.recipe, run.lines[-1]
    data, goal, optimizer, schedule = (given[key] for key in ("data", "objective", "optimizer", "schedule"))
    batch = f"{data['batch_size']} sequences of {data['sequence_length']:,} tokens"
    warmup = "1 step" if schedule["warmup_steps"] == 1 else f"{schedule['warmup_steps']:,} steps"
    highest = optimizer["learning_rate"]
    router_rate = optimizer["router_learning_rate"] or highest
    betas = optimizer["betas"]
    parameters = run.record.parameters or {}
    trained = {kind: parameters.get(f"trained_{kind}", 1) for kind in ("base", "adapters", "routers", "fallbacks")}
    routing = [kind for kind in ("routers", "fallbacks") if trained[kind]]
    dense = bool(trained["base"] or trained["adapters"])

    def rates(rate: float) -> str:
        """A rate of the base's weights, and what it is of routers and fallbacks, whose rates are in one ratio to it."""
        of_routing = [f"{rate * router_rate / highest:g} of {' and '.join(routing)}"] if routing else []
        return ", ".join([f"{rate:g}"] * dense + of_routing)

    pairs: Pairs = [
        ("objective", objective(goal["kind"], run.reference)),
        ("tokens", f"{run.tokens:,}"),
        ("steps", f"{last.step:,} of {given['max_steps']:,}, each {batch}"),
        ("weights trained", weights_trained(run.record.parameters, given).text),
        ("highest learning rate", rates(highest)),
        ("schedule", f"{warmup} of warm-up, then cosine to {rates(schedule['final_learning_rate'])}"),
        ("AdamW", f"betas {betas[0]:g} and {betas[1]:g}, weight decay {optimizer['weight_decay']:g}"),
    ]
    if optimizer["max_grad_norm"] is not None:
        pairs.append(("gradients clipped to norm", f"{optimizer['max_grad_norm']:g}"))
    if goal["kind"] == "distillation":
        layer = goal["layer_coefficient"]
        extra = f", layers' distance weighed {layer:g}" if layer else ""
        pairs.append(("distillation", f"temperature {goal['temperature']:g}{extra}"))
    if (beta := run.record.balance_coefficient) is not None:
        pairs.append(("load-balance weight", f"{beta:g}"))
    if schedule["anneal_steps"]:
        pairs.append(("heads switched off over", f"{schedule['anneal_steps']:,} steps"))
    if learned := given.get("shared_heads"):
        pairs.append(("shared heads learned over", f"{learned['steps']:,} steps, {learned['number']} per layer"))
    if dropped := run.dropped:
        listed = "; ".join(f"{step['step']:,}: {step['reason']}" for step in dropped[:_LISTED])
        more = "; …" if len(dropped) > _LISTED else ""
        pairs.append(("steps dropped as diverging", f"{len(dropped):,} ({listed}{more})"))
    computed = run.record.compute_dtype or ("bfloat16" if given["mixed_precision"] == "bf16" else "float32")
    pairs += [("compute dtype", computed), ("seed", str(run.seed))]
    if device := run.record.device:
        processes, name = run.record.processes or 1, run.record.device_name
        named = f"{device} ({name})" if name else device
        pairs.append(("device", f"{named}, {processes} process{'es' if processes > 1 else ''}"))
    return pairs


def objective(kind: str, teacher: ReferenceKind) -> str:
    """An objective in words."""
    words = {
        "distillation": f"distillation, teacher: {REFERENCES[teacher]}",
        "cross_entropy": "cross-entropy on the text",
    }
    return words.get(kind, kind)


def receipt(run: TrainingRun, most: int | None = None) -> Table | None:
    """What was read of each source: for an unfinished run up to its last step; None where it is not recorded.

    ``most``: so many sources get a row, those that were read most first, and the others one together.
    """
    read = run.record.data_read
    if read is None:
        tokens = run.lines[-1].tokens_of_source or {}
        total = sum(tokens.values())
        read = {name: {"tokens": count, "share": count / total if total else None} for name, count in tokens.items()}
    ranked = sorted(read.items(), key=lambda item: -item[1]["tokens"])
    shown = [(name, entry) for name, entry in ranked[:most]]
    if others := [entry for _, entry in ranked[len(shown) :]]:
        summed = {key: sum(entry[key] for entry in others) for key in ("weight", "share", "tokens", "repeated_tokens")}
        shown.append((f"{len(others):,} others", summed))
    forms = {"weight": ".2%", "share": ".2%", "tokens": ",.0f", "epochs": "#.3g", "repeated_tokens": ",.0f"}
    rows = [[Code(name), *(show_number(entry.get(key), form) for key, form in forms.items())] for name, entry in shown]
    head = ["source", "planned share", "realised share", "tokens", "epochs", "repeated tokens"]
    return Table(head, rows) if rows else None


def held_out(run: TrainingRun, most: int | None = None) -> list[Block]:
    """Scores on held-out text over training, the saved model's last, and what they are of.

    ``most``: to so many, at least 2, the scores before the last are thinned out.
    """
    scores = run.scores
    if most is not None and len(scores) > most:
        kept = {round(index * (len(scores) - 1) / (most - 1)) for index in range(most)}
        scores = [scores[index] for index in sorted(kept)]
    saved = run.saved_score
    if saved:
        scores = [*scores, saved | {"routing": None}]
    if not scores:
        return [Paragraph(_NO_SCORES)]
    figures = {
        "perplexity": ("perplexity", "#.5g"),
        "reference's": ("reference_perplexity", "#.5g"),
        "ratio": ("ratio", "#.5g"),
        "KL": ("kl", "#.3g"),
    }
    rows = []
    for score in scores:
        health = score["routing"] or dict.fromkeys(("dead_heads", "routed_heads", "lowest_entropy", "changed"))
        dead = health["dead_heads"]
        rows.append(
            [
                f"{score['tokens']:,}" + (" (saved model)" if score is scores[-1] and saved else ""),
                show_number(score["held_out_documents"], ","),
                *(show_figure(score[key], score.get(f"{key}_interval"), form) for key, form in figures.values()),
                show_number(score["top1_agreement"], ".2f", 100),
                "-" if dead is None else f"{dead} of {health['routed_heads']}",
                show_number(health["lowest_entropy"], ".3f"),
                show_number(health["changed"], ".2f", 100),
            ]
        )
    routers = ["dead heads", "lowest routing entropy", "tokens with other heads %"]
    table = Table(["tokens", "documents", *figures, "same top-1 %", *routers], rows, text=0)
    return [table.without_empty_columns(), Paragraph(_held_out_note(run))]


def _held_out_note(run: TrainingRun) -> str:
    lines, saved = [line.validation for line in run.lines if line.validation], run.record.evaluation
    last = saved or lines[-1]
    notes = [scored_text(last).text]
    if run.compares:
        notes.append(f"Ratio of perplexities and KL (nats per token): to {in_words([run.reference])[0]}.")
    if last.kl_interval or last.ratio_interval:
        notes.append("In brackets: 95 % intervals over the documents.")
    health = [score["routing"] for score in run.scores if score["routing"]]
    if any(found["routed_heads"] for found in health):
        notes.append("Dead heads: no token selects them, of the heads that tokens choose among.")
    if any(found["changed"] is not None for found in health):
        notes.append(
            "Tokens with other heads: than before the first step, mean over the layers in which tokens choose, without "
            "the tokens that have all heads on anyway."
        )
    claims = (floor_of_kl(run.floor), saved_model(saved, run.reference))
    return " ".join([*notes, *(claim.text for claim in claims if claim is not None)])


def _spread(found: Record | None, form: str, bounds: Sequence[float] | None = None, factor: float = 1) -> str:
    """Mean and deviation of a group, or the interval of its only run."""
    if found is None:
        return "-"
    if found["std"] is not None:
        return show_error(found["mean"] * factor, found["std"] * factor, form, "#.2g")
    return show_figure(found["mean"] * factor, bounds, form)


def _short(value: Any) -> str:
    """A recipe's value in few characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")
