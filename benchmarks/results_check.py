"""Run a small part of each measured table again, and compare: `make results-check BASE=DIR ...`.

`docs/results/check.yaml` has the commands, where each figure is in what they print, and how far off it may be. A run
whose variables are not set is named and left out. Each figure that differs is a line at the end, and the status is 1.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moh_llm.errors import UserError
from moh_llm.reading import read_yaml

ROOT = Path(__file__).resolve().parents[1]
CHECKS = ROOT / "docs" / "results" / "check.yaml"


def main() -> int:
    faults = check(read_yaml(CHECKS), os.environ)
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


def check(runs: list[dict[str, Any]], variables: Mapping[str, str]) -> list[str]:
    """Carry out what can be; returns a line for each figure that differs, and each run that fails."""
    faults = []
    for number, run in enumerate(runs, start=1):
        pages = ", ".join(dict.fromkeys(figure["page"] for figure in run["figures"]))
        if missing := [name for name in run["needs"] if not variables.get(name)]:
            print(f"[{number}/{len(runs)}] {pages}: not checked, {', '.join(missing)} not given", flush=True)
            continue
        print(f"[{number}/{len(runs)}] {pages} ...", flush=True)
        try:
            printed = carry_out(run["commands"], variables)
        except UserError as error:
            faults.append(f"error: {pages}: {error}")
            continue
        for figure in run["figures"]:
            found = re.search(figure["pattern"], printed)
            if not found:
                where = f"{figure['page']}, {figure['figure']}"
                faults.append(f"error: {where}: not in what the commands print; see {CHECKS}")
                continue
            value, wanted, tolerance = float(found[1]), figure["value"], figure["tolerance"]
            of = f" ({figure['slice']})" if "slice" in figure else ""
            line = f"{figure['page']}, {figure['figure']}{of}: {value:g}, {wanted:g} +- {tolerance:g} in the table"
            if abs(value - wanted) > tolerance * (1 + 1e-9):
                faults.append(f"differs: {line}")
            else:
                print(f"  {line}", flush=True)
    return faults


def carry_out(commands: list[str], variables: Mapping[str, str]) -> str:
    """What the commands print. Raises UserError with the end of the errors of one that fails."""
    printed = []
    with tempfile.TemporaryDirectory() as work:
        values = {**variables, "WORK": work}
        for command in commands:
            words = [re.sub(r"\$(\w+)", lambda name: values[name[1]], word) for word in shlex.split(command)]
            words = [sys.executable if word == "python" else word for word in words]
            done = subprocess.run(words, cwd=ROOT, env={**os.environ, **values}, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
                raise UserError(f"{command} ended with status {done.returncode}: {''.join(last)}")
            printed.append(done.stdout)
    return "\n".join(printed)


if __name__ == "__main__":
    sys.exit(main())
