"""The report's HTML file: what an evaluation and training runs left, on one page. Needs matplotlib."""

import json
from collections.abc import Sequence
from types import NoneType
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from moh_llm.evaluation.margin import CHANCE, MARGIN
from moh_llm.evaluation.verdict import base_of, compared_models, dtypes, verdict, warnings
from moh_llm.reporting.groups import Group, same_held_out_text
from moh_llm.reporting.page import OTHER_TEXT
from moh_llm.reporting.web.benchmarks import score_charts, table_head, table_rows
from moh_llm.reporting.web.efficiency import cost_charts, head_rows
from moh_llm.reporting.web.routers import router_page
from moh_llm.reporting.web.training import run_rows, training_charts

Record = dict[str, Any]


def to_html(report: Record, groups: Sequence[Group] = (), command: str = "") -> str:
    """The page of an evaluation, of training runs, or of both.

    Args:
        report: what `report.json` holds: a record made by `build_report` or `merge`, or one of training runs.
        groups: training runs, as `group_runs` puts them together.
        command: the line that repeats the page.
    """
    runs = [run for group in groups for run in group.runs]
    context: Record = {
        "command": command,
        "runs": [run_rows(run) for run in runs],
        "training_warning": "" if same_held_out_text(runs) else OTHER_TEXT,
        "training_charts": training_charts(groups) if groups else [],
        "json_link": "data:application/json;charset=utf-8," + quote(json.dumps(report, separators=(",", ":"))),
        "title": f"Training run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} training runs",
        "evaluation": None,
    }
    if "suite" in report:
        context |= {"title": report["suite"]["title"], "evaluation": _evaluation(report)}
    loader = PackageLoader("moh_llm.reporting.web")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template("report.html").render(context)


def _evaluation(report: Record) -> Record:
    """What the template shows of an evaluation."""
    analyses = report.get("analysis") or {}
    known = {label: found for label, found in analyses.items() if "error" not in found}
    columns, published = table_head(report)
    return {
        "verdicts": [verdict(report, label) for label in compared_models(report) or report["models"]],
        "warnings": warnings(report),
        "compared": any(base_of(report, label) for label in report["models"]),
        "chance": f"{CHANCE} {MARGIN}",
        "columns": columns,
        "published": published,
        "rows": table_rows(report),
        "charts": score_charts(report),
        "heads": head_rows(known),
        "costs": cost_charts(known, list(report["models"])),
        "routers": [router_page(number, label, found) for number, (label, found) in enumerate(known.items(), start=1)],
        "models": [(label, _facts(about)) for label, about in report["models"].items()],
        "environment": _environment(report),
        "commands": report["command"],
    }


def _facts(about: Record) -> list[tuple[str, str]]:
    facts = [("from", about["model"]), ("type", about.get("model_type", ""))]
    facts += [
        (key, _per_layer(value) if isinstance(value, list) else str(value))
        for key, value in about.get("heads", {}).items()
        if not isinstance(value, (dict, NoneType))
    ]
    facts += [("weights (SHA-256)", about.get("weights_sha256") or ""), ("commit", about.get("revision") or "")]
    facts += [
        ("dtype", about["dtype"]),
        ("stored in", about.get("stored_dtype", "")),
        ("device", about["device"]),
        ("hardware", about.get("hardware", "")),
    ]
    facts += [("context", f"{about['context']:,} tokens")]
    facts += [("scored", f"{about['items']:,} items in {about['seconds']:,.0f} s")]
    return [(name, value) for name, value in facts if value]


def _per_layer(numbers: list[Any]) -> str:
    """A number for each layer, ``7, 5``; nothing for the ids of shared heads, which the routers' pages show."""
    return ", ".join(map(str, numbers)) if all(isinstance(number, int) for number in numbers) else ""


def _environment(report: Record) -> list[tuple[str, str]]:
    return [
        ("data", report["data"]),
        ("dtype of every model", " and ".join(dtypes(report))),
        ("batch size", str(report["batch_size"])),
        ("prefixes shared", str(report.get("share_prefixes", "not recorded"))),
        ("processes", str(report["processes"])),
        ("seeds", ", ".join(f"{name} {seed}" for name, seed in report["seeds"].items())),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("made", report["created"]),
    ]
