"""The report as a page of Markdown: comparison and each run's figures."""

import json
from collections.abc import Sequence
from typing import Any

from moh_llm.reporting.runs import Record

OTHER_TEXT = "The runs were not scored on the same held-out text: compare only ratios, and with care."
# Dropped steps that are listed one by one.
_LISTED = 10
# Facts that are names of files.
_NAMES = ("folder", "model", "mixture")


def to_markdown(report: Record) -> str:
    """The page for a record made by `write_report`."""
    runs = report["runs"]
    title = f"Training run {runs[0]['name']}" if len(runs) == 1 else f"{len(runs)} training runs"
    parts = [f"# {title}"]
    if len(runs) > 1:
        parts += ["## Comparison", *_comparison(report)]
    parts.append("The curves are in `report.html`.")
    for run in runs:
        parts += [f"## {'Figures' if len(runs) == 1 else run['name']}", *_run(run)]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts += [f"{versions}. {report['created']}.", f"```\n{report['command']}\n```"]
    return "\n\n".join(parts) + "\n"


def run_facts(run: Record) -> dict[str, str]:
    """What there is to say of a run that `summarise` returned, beside its scores; the HTML page says it, too."""
    objective = run["objective"]
    # A layer coefficient of 0 says that there is no such term.
    given = {key: value for key, value in objective.items() if key != "kind" and value is not None}
    settings = [f"{key} {_short(value)}" for key, value in given.items() if value or key != "layer_coefficient"]
    tuned = "all weights" if run["lora"] is None else f"LoRA of rank {run['lora']['rank']}"
    speed = run["tokens_per_second"]
    status = "finished" if run["status"] == "finished" else f"{run['status']}: not finished, or stopped before its end"
    facts = {
        "folder": run["folder"],
        "status": status,
        "model": run["model"],
        "mixture": run["mixture"],
        "objective": f"{objective['kind']} ({', '.join(settings)}), {tuned}, seed {run['seed']}",
        "steps": f"{run['steps']:,} of {run['max_steps']:,}",
        "tokens": f"{run['tokens']:,}",
        "seconds of training": f"{run['seconds']:,.1f}",
        "tokens per second (median)": "-" if speed is None else f"{speed:,.5g}",
        "device": f"{run['device']}, {run['processes']} process(es)",
    }
    if run["reference"]:
        facts["compared with"] = run["reference"]
    if run["floor"] is not None:
        facts["floor of KL"] = f"{run['floor']:.3g}: with all heads on, before the first step"
    if run["loss"]:
        facts["loss"] = ", ".join(
            f"{which} {found['loss']:.4g} (step {found['step']:,})" for which, found in run["loss"].items()
        )
    if run["dropped"]:
        listed = "; ".join(f"{step['step']:,}: {step['reason']}" for step in run["dropped"][:_LISTED])
        facts["dropped steps"] = f"{len(run['dropped']):,} ({listed}{'; …' if len(run['dropped']) > _LISTED else ''})"
    if run["last_log_line_cut"]:
        facts["log"] = "the last line was cut short and is left out"
    return facts


def _comparison(report: Record) -> list[str]:
    keys = report["differences"]
    rows = []
    for group in report["groups"]:
        runs = ", ".join(group["runs"])
        values = [_short(by_group[group["name"]]) for by_group in keys.values()]
        rows.append([group["name"], runs, ", ".join(map(str, group["seeds"])), *values])
    parts = [_table(["group", "runs", "seeds", *keys], rows)]
    if len(report["groups"]) > 1 and not keys:
        parts.append("The groups have the same recipe, model, text and seed.")
    elif keys:
        parts.append(
            "The columns after the seeds are the recipe keys that differ; those that change no curve are left out."
        )
    if not report["same_held_out_text"]:
        parts.append(f"> **{OTHER_TEXT}**")
    if not report["comparison"]:
        return [*parts, "No two runs have a score at the same number of tokens."]
    head = ["tokens", "group", "runs", "documents", "ratio", "KL", "same top-1 %", "perplexity"]
    body = []
    for row in report["comparison"]:
        tokens = f"{row['tokens']:,}" + (" (saved)" if row["saved_model"] else "")
        for name, found in row["groups"].items():
            figures = [
                _count(found["documents"]),
                _spread(found["ratio"], "#.5g") + _interval(found["ratio_interval"], "#.5g"),
                _spread(found["kl"], "#.3g") + _interval(found["kl_interval"], "#.3g"),
                _spread(found["top1_agreement"], ".2f", 100),
                _spread(found["perplexity"], "#.5g"),
            ]
            body.append([tokens, name, str(found["n"]), *figures])
    note = (
        f"Ratio of perplexities and KL: to {report['reference']}. Mean ± standard deviation over the runs of a group; "
        "of a single run, in brackets, the 95 % interval over the held-out documents; (saved): the saved models, as "
        "they stand on disk."
    )
    return [*parts, _table(head, body, left=2), note]


def _run(run: Record) -> list[str]:
    rows = [[name, f"`{value}`" if name in _NAMES else value] for name, value in run_facts(run).items()]
    parts = [_table(["", ""], rows, left=2)]
    if not run["scores"] and not run["saved_model"]:
        return [*parts, "No score on held-out text yet."]
    return [*parts, _scores(run), "In brackets: 95 % intervals by bootstrap over the held-out documents."]


def _scores(run: Record) -> str:
    routed = any(score["routing"] for score in run["scores"])
    head = ["tokens", "documents", "perplexity", "reference's", "ratio", "KL", "same top-1 %"]
    head += ["dead heads", "lowest routing entropy", "tokens with other heads %"] if routed else []
    body = []
    saved = [run["saved_model"] | {"routing": None, "saved": True}] if run["saved_model"] else []
    for score in [*run["scores"], *saved]:
        tokens = f"{score['tokens']:,}" + (" (saved)" if "saved" in score else "")
        figures = [("perplexity", "#.5g"), ("reference_perplexity", "#.5g"), ("ratio", "#.5g"), ("kl", "#.3g")]
        cells = [tokens, _count(score["held_out_documents"])]
        cells += [_figure(score[key], form) + _interval(score.get(f"{key}_interval"), form) for key, form in figures]
        cells.append(_figure(score["top1_agreement"], ".2f", 100))
        if routed:
            health = score["routing"] or dict.fromkeys(("dead_heads", "routed_heads", "lowest_entropy", "changed"))
            dead = "-" if health["dead_heads"] is None else f"{health['dead_heads']} of {health['routed_heads']}"
            cells += [dead, _figure(health["lowest_entropy"], ".3f"), _figure(health["changed"], ".2f", 100)]
        body.append(cells)
    notes = [f"Reference: {run['reference']}."] if run["reference"] else []
    if saved and saved[0]["all_heads_kl"] is not None:
        notes.append(
            f"The saved model with all heads on has KL {saved[0]['all_heads_kl']:.3g} to it; saved model and reference "
            f"were scored in {saved[0]['dtype']}."
        )
    return "\n\n".join([_table(head, body, left=0), *([" ".join(notes)] if notes else [])])


def _table(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 99) -> str:
    """A table; columns from ``left`` on are aligned to the right."""
    rules = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [head, rules, *body])


def _figure(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else f"{value * factor:{form}}".rstrip(".")


def _interval(bounds: Sequence[float] | None, form: str) -> str:
    """An interval to follow its figure; empty where there is none, as of one document."""
    return "" if bounds is None else f" ({_figure(bounds[0], form)} to {_figure(bounds[1], form)})"


def _count(documents: int | None) -> str:
    return "-" if documents is None else f"{documents:,}"


def _spread(found: Record | None, form: str, factor: float = 1) -> str:
    if found is None:
        return "-"
    error = "" if found["std"] is None else f" ± {found['std'] * factor:#.2g}"
    return _figure(found["mean"], form, factor) + error


def _short(value: Any) -> str:
    """A recipe's value in few characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")
