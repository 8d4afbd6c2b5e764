"""Score a model and its base on benchmarks, and write a report.

    python evaluate.py MODEL --base BASE --suite paper --data-dir DATA --output-dir out/report
    torchrun --nproc-per-node 8 evaluate.py recipes/evaluate_paper.yaml

``--help`` lists the flags; a YAML recipe holds the same ones. The same command resumes an interrupted evaluation.
``moh-llm evaluate`` is the same command (moh_llm/commands/evaluate.py: flags, `run`, what is printed), and
`moh_llm.evaluate` the same as a Python function.

How `moh_llm.evaluate` works (moh_llm/evaluation/evaluate.py):

1. Read the suite and its data. Every row that will be scored is checked before a model is loaded.
2. Score each model on each benchmark with lm-eval, one model in memory at a time (moh_llm/evaluation/runner.py).
3. Compare with the base: differences on the same items, shares of the base's score and of its margin over chance,
   each with a 95 % interval (moh_llm/evaluation/record.py).
4. Analyse what the heads of MoH models did on the benchmarks' prompts (moh_llm/analysis).
5. Write report.html, report.md and report.json (moh_llm/evaluation/report.py).

This file has the name of Hugging Face's `evaluate` library, which lm-eval imports. So the script takes its folder off
the import path, and whoever imports `evaluate` with this folder on the path gets the library.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def path_without_this_folder() -> list[str]:
    """`sys.path` less every entry that is this file's folder."""
    here = Path(__file__).resolve().parent
    return [entry for entry in sys.path if Path(entry or ".").resolve() != here]


def import_library() -> None:
    """Put the `evaluate` library in this module's place."""
    spec = importlib.machinery.PathFinder.find_spec("evaluate", path_without_this_folder())
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'evaluate'", name="evaluate")
    library = importlib.util.module_from_spec(spec)
    sys.modules["evaluate"] = library
    spec.loader.exec_module(library)


if __name__ == "evaluate":
    import_library()

if __name__ == "__main__":
    from moh_llm.cli import main

    sys.path[:] = path_without_this_folder()
    sys.exit(main(["evaluate", *sys.argv[1:]]))
