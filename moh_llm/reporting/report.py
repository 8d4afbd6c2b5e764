"""The report of some training runs: a plain record (JSON), a page to read (Markdown) and pictures. Needs matplotlib."""

import datetime
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from moh_llm import __version__
from moh_llm.files import write_json, write_text
from moh_llm.reporting.figures import draw
from moh_llm.reporting.groups import compare, differences, group_runs, same_held_out_text
from moh_llm.reporting.page import to_markdown
from moh_llm.reporting.runs import Record, TrainingRun, summarise


def write_report(folder: Path, runs: Sequence[TrainingRun], command: str) -> Record:
    """Write ``report.md``, ``report.json`` and the pictures into ``folder``; returns the record.

    Args:
        folder: an empty one.
        runs: what `read_runs` returned.
        command: the line that repeats the report.
    """
    groups = group_runs(runs)
    report = {
        "runs": [summarise(run) for run in runs],
        "groups": [
            {"name": group.name, "runs": [run.name for run in group.runs], "seeds": [run.seed for run in group.runs]}
            for group in groups
        ],
        "differences": differences(groups),
        "same_held_out_text": same_held_out_text(runs),
        "comparison": compare(groups),
        "pictures": [{"file": picture.file, "title": picture.title} for picture in draw(folder, groups)],
        "versions": {"moh_llm": __version__, "matplotlib": version("matplotlib")},
        "command": command,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    write_json(folder / "report.json", report)
    write_text(folder / "report.md", to_markdown(report))
    return report
