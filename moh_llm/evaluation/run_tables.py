"""The tables of training runs, for reports and model cards: recipes, held-out scores, groups."""

import json
from collections.abc import Sequence
from typing import Any

from moh_llm.claims.training import saved_model, scored_text, weights_trained
from moh_llm.evaluation.rendering import Table, facts
from moh_llm.evaluation.runs import Group, Record, TrainingRun, compare_groups, differences, reference_words
from moh_llm.intervals import show_error, show_figure, show_number
from moh_llm.records.conversion import REFERENCES, ReferenceKind, in_words
from moh_llm.records.run import Routing, Scores

Pairs = list[tuple[str, str]]
# Dropped steps that are listed one by one.
_LISTED = 10


def group_table(groups: Sequence[Group]) -> Table:
    """The runs and seeds of each group, and the options that differ between groups."""
    changed = differences(groups)
    rows = []
    for group in groups:
        names, seeds = zip(*((run.name, str(run.recipe["seed"])) for run in group.runs), strict=True)
        options = [_short(by_group[group.name]) for by_group in changed.values()]
        rows.append([group.name, ", ".join(names), ", ".join(seeds), *options])
    return Table(["group", "runs", "seeds", *changed], rows, text=3 + len(changed))


def comparison_table(groups: Sequence[Group]) -> Table | None:
    """The scores of groups at equal numbers of tokens; None if no two runs have such scores."""
    rows = []
    for row in compare_groups(groups):
        tokens = f"{row['tokens']:,}" + (" (saved)" if row["saved_model"] else "")
        for name, found in row["groups"].items():
            figures = [
                show_number(found["documents"], ","),
                _spread(found["ratio"], "#.5g", found["ratio_interval"]),
                _spread(found["kl"], "#.3g", found["kl_interval"]),
                _spread(found["top1_agreement"], ".2f", factor=100),
                _spread(found["perplexity"], "#.5g"),
            ]
            rows.append([tokens, name, str(found["n"]), *figures])
    head = ["tokens", "group", "runs", "documents", "ratio", "KL", "same top-1 %", "perplexity"]
    return Table(head, rows, text=2) if rows else None


def comparison_note(groups: Sequence[Group]) -> str:
    """How to read `group_table` and `comparison_table`."""
    if comparison_table(groups) is None:
        return "No two runs have a score at the same number of tokens."
    return (
        "Runs of a group differ only by their seed. The columns after the seeds are the options that differ between "
        "groups, without options that change no curve. "
        f"Ratio of perplexities and KL: to {reference_words(groups)[0]}. "
        "Mean ± standard deviation over the runs of a group; for a single run, in brackets, the 95 % interval over the "
        "held-out documents; (saved): the saved models, as they are on disk."
    )


def group_warnings(groups: Sequence[Group]) -> list[str]:
    """A warning unless all runs were scored on the same text, as far as the records tell."""
    texts = set()
    for run in (run for group in groups for run in group.runs):
        text = [run.record.data, run.recipe["data"]["sequence_length"], run.recipe["evaluation"]["max_tokens"]]
        texts.add(json.dumps(text, sort_keys=True))
    other = "The runs were not scored on the same held-out text: compare only ratios, and with care."
    return [other] if len(texts) > 1 else []


def run_table(run: TrainingRun) -> Table:
    """The facts of one run: its folder, status, recipe, speed and losses."""
    found, mixture = run.figures(), run.recipe["data"]["mixture"]
    status = run.record.status
    pairs: Pairs = [
        ("folder", str(run.folder)),
        ("status", status if status == "finished" else f"{status}: not finished, or stopped before its end"),
        ("model", run.recipe["model"]),
        ("mixture", f"{run.record.mixture}, {mixture}" if run.record.mixture else mixture),
        *recipe(run),
        ("seconds of training", f"{found['seconds']:,.1f}"),
    ]
    if (speed := found["tokens_per_second"]) is not None:
        pairs.append(("tokens per second (median)", f"{speed:,.5g}"))
    if found["loss"]:
        shown = [f"{which} {at['loss']:.4g} (step {at['step']:,})" for which, at in found["loss"].items()]
        pairs.append(("loss", ", ".join(shown)))
    if run.cut:
        pairs.append(("log", "the last line was cut short and is left out"))
    return facts(pairs)


def recipe(run: TrainingRun) -> Pairs:
    """How a run trained: objective, steps, weights, the options of optimizer and schedule, and the device."""
    given, data, goal = run.recipe, run.recipe["data"], run.recipe["objective"]
    batch = f"{data['batch_size']} sequences of {data['sequence_length']:,} tokens"
    pairs: Pairs = [
        ("objective", objective(goal["kind"], run.reference)),
        ("tokens", f"{run.tokens:,}"),
        ("steps", f"{run.lines[-1].step:,} of {given['max_steps']:,}, each {batch}"),
        ("weights trained", weights_trained(run.record.parameters, given)),
    ]
    options = {f"{group}.{key}": value for group in ("optimizer", "schedule") for key, value in given[group].items()}
    if goal["kind"] == "distillation":
        options |= {f"objective.{key}": goal[key] for key in ("temperature", "layer_coefficient")}
    pairs += [(key, _short(value)) for key, value in options.items() if value is not None]
    if (beta := run.record.balance_coefficient) is not None:
        pairs.append(("load-balance weight", f"{beta:g}"))
    if learned := given.get("shared_heads"):
        pairs.append(("shared heads learned over", f"{learned['steps']:,} steps, {learned['number']} per layer"))
    if dropped := [line for line in run.lines if line.dropped]:
        listed = "; ".join(f"{line.step:,}: {line.dropped}" for line in dropped[:_LISTED])
        more = "; …" if len(dropped) > _LISTED else ""
        pairs.append(("steps dropped as diverging", f"{len(dropped):,} ({listed}{more})"))
    computed = run.record.compute_dtype or ("bfloat16" if given["mixed_precision"] == "bf16" else "float32")
    pairs += [("compute dtype", computed), ("seed", str(given["seed"]))]
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
    """The tokens that a run read of each source so far; None if the log does not have them.

    ``most``: the number of rows, of the sources that were read most; another row sums up the others.
    """
    read = run.record.data_read
    if read is None:
        tokens = run.lines[-1].tokens_of_source or {}
        total = sum(tokens.values())
        read = {name: {"tokens": count, "share": count / total if total else None} for name, count in tokens.items()}
    ranked = sorted(read.items(), key=lambda item: -item[1]["tokens"])
    shown = ranked[:most]
    if others := [entry for _, entry in ranked[len(shown) :]]:
        summed = {key: sum(entry[key] for entry in others) for key in ("weight", "share", "tokens", "repeated_tokens")}
        shown.append((f"{len(others):,} others", summed))
    forms = {"weight": ".2%", "share": ".2%", "tokens": ",.0f", "epochs": "#.3g", "repeated_tokens": ",.0f"}
    rows = [[name, *(show_number(entry.get(key), form) for key, form in forms.items())] for name, entry in shown]
    head = ["source", "planned share", "realised share", "tokens", "epochs", "repeated tokens"]
    return Table(head, rows) if rows else None


def held_out_table(run: TrainingRun, most: int | None = None) -> Table | None:
    """Scores on held-out text over training, the saved model's last; None if the run has no scores.

    ``most``: at least 2; more scores before the last are thinned out.
    """
    lines, saved = run.scored, run.record.evaluation
    if most is not None and len(lines) > most:
        kept = {round(index * (len(lines) - 1) / (most - 1)) for index in range(most)}
        lines = [lines[index] for index in sorted(kept)]
    rows = [[f"{line.tokens:,}", *_figures(line.validation), *_health(line.routing)] for line in lines]
    if saved:
        rows.append([f"{run.tokens:,} (saved model)", *_figures(saved), *_health(None)])
    scores = ["documents", "perplexity", "reference's", "ratio", "KL", "same top-1 %"]
    head = ["tokens", *scores, "dead heads", "lowest routing entropy", "tokens with other heads %"]
    return Table(head, rows, text=0).without_empty_columns() if rows else None


def _figures(scores: Scores) -> list[str]:
    return [
        show_number(scores.documents, ","),
        show_number(scores.perplexity, "#.5g"),
        show_number(scores.reference_perplexity, "#.5g"),
        show_figure(scores.ratio, scores.ratio_interval, "#.5g"),
        show_figure(scores.kl, scores.kl_interval, "#.3g"),
        show_number(scores.top1_agreement, ".2f", 100),
    ]


def _health(routing: Routing | None) -> list[str]:
    """Dead heads, lowest entropy, and share of tokens with other heads than before the first step."""
    if routing is None:
        return ["-", "-", "-"]
    entropy = [value for value, load in zip(routing.entropy, routing.load, strict=False) if load and value is not None]
    return [
        f"{sum(routing.dead_heads)} of {sum(map(len, routing.load))}",
        show_number(min(entropy, default=None), ".3f"),
        show_number(routing.tokens_with_other_heads, ".2f", 100),
    ]


def held_out_note(run: TrainingRun) -> str:
    """What the scores of `held_out_table` are of, and how to read them."""
    saved = run.record.evaluation
    if not saved and not run.scored:
        return "Not measured: the run scored no held-out text."
    last = saved or run.scored[-1].validation
    notes = [scored_text(last)]
    if run.compares:
        notes.append(f"Ratio of perplexities and KL (nats per token): to {in_words([run.reference])[0]}.")
    if last.kl_interval or last.ratio_interval:
        notes.append("In brackets: 95 % intervals over the documents.")
    health = [line.routing for line in run.scored if line.routing]
    if any(any(found.load) for found in health):
        notes.append("Dead heads: routed heads that no token selects.")
    if any(found.tokens_with_other_heads is not None for found in health):
        notes.append(
            "Tokens with other heads: other than before the first step, mean over the layers with a router, "
            "without tokens that have all heads on."
        )
    return " ".join(filter(None, [*notes, saved_model(saved, run.reference)]))


def _spread(found: Record | None, form: str, bounds: Sequence[float] | None = None, factor: float = 1) -> str:
    """Mean and deviation of a group, or the interval of its only run."""
    if found is None:
        return "-"
    if found["std"] is not None:
        return show_error(found["mean"] * factor, found["std"] * factor, form, "#.2g")
    return show_figure(found["mean"] * factor, bounds, form)


def _short(value: Any) -> str:
    """An option's value in few characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")
