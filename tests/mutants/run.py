"""Put each fault of `patches.py` into a copy of the package and see a test fail: `make mutants`, some minutes.

Names of patches, or parts of them, as arguments choose among them. Ends with status 1 where no test fails.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from patches import PATCHES, Patch

ROOT = Path(__file__).resolve().parents[2]
TESTS_FAILED = 1  # pytest's exit status; others say that it could not run them


class CannotRun(Exception):
    """A patch or its tests say nothing; the message tells why."""


def failing_test(copy: Path, tests: Iterable[str]) -> str | None:
    """The first test that fails in a copy of the repository; None where all pass."""
    # Without bytecode: its time stamps are too coarse for files that change twice within a second.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]  # with the slow ones
    words = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, TESTS_FAILED):
        raise CannotRun(f"the tests did not run:\n{(done.stdout + done.stderr)[-2000:]}")
    # A fixture that fails is an ERROR: a conversion, say, that does not pass its own proof.
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else None


def found_by(patch: Patch, copy: Path) -> str | None:
    """The first test that fails with the patch; None where none does."""
    file = copy / patch.file
    text = file.read_text()
    if text.count(patch.old) != 1:
        raise CannotRun(f"{patch.file} holds {patch.old!r} {text.count(patch.old)} times, not once")
    file.write_text(text.replace(patch.old, patch.new))
    try:
        return failing_test(copy, patch.tests)
    finally:
        file.write_text(text)


def main(parts: list[str]) -> int:
    """Try the chosen patches; the exit status."""
    chosen = [patch for patch in PATCHES if not parts or any(part in patch.name for part in parts)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "copy"
        for name in ("moh_llm", "tests", "recipes", "data_mixtures"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (path for path in ROOT.iterdir() if path.is_file()):
            shutil.copy(path, copy)
        if failed := failing_test(copy, sorted({test for patch in chosen for test in patch.tests})):
            print(f"error: without a fault {failed}")
            return 1
        for patch in chosen:
            try:
                test = found_by(patch, copy)
                print(f"{'found' if test else 'MISSED':7} {patch.name}: {test or ', '.join(patch.tests)}", flush=True)
            except CannotRun as error:
                test = None
                print(f"MISSED  {patch.name}: {error}", flush=True)
            missed += test is None
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
