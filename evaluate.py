"""Score a model: ``python evaluate.py MODEL [--base BASE] --suite paper --output out/report``.

The same as ``moh-llm evaluate``; ``--help`` lists the flags.

This file's name is also that of Hugging Face's `evaluate` library, which lm-eval imports. So the script
takes its own folder off the import path before lm-eval is loaded, and whoever imports `evaluate` with
this folder on the path gets the library.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def path_without_this_folder() -> list[str]:
    """`sys.path` less every entry that is this file's folder."""
    here = Path(__file__).resolve().parent
    return [entry for entry in sys.path if Path(entry or ".").resolve() != here]


def hand_over_to_library() -> None:
    """Put the real `evaluate` library in this module's place."""
    spec = importlib.machinery.PathFinder.find_spec("evaluate", path_without_this_folder())
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("No module named 'evaluate'", name="evaluate")
    library = importlib.util.module_from_spec(spec)
    sys.modules["evaluate"] = library
    spec.loader.exec_module(library)


if __name__ == "evaluate":
    hand_over_to_library()

if __name__ == "__main__":
    from moh_llm.cli import main

    sys.path[:] = path_without_this_folder()
    sys.exit(main(["evaluate", *sys.argv[1:]]))
