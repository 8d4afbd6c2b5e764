"""Text that comes with every Python, so that everything runs without a download and a licence question (PSF).

Each document has a group. Documents of one group are held out together, since they share content: a module's source and
its docstrings, and the modules of one package, many of which are variants of each other.
"""

import ast
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Part of what identifies the tokens of built-in text, so that a cache with another split is not used.
SPLIT = "by package"
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}


def embedded_documents(name: str) -> Iterator[tuple[str, str]]:
    """Group and text of the documents of a built-in source, in a fixed order."""
    return ((group, text) for group, text in _BUILTIN[name]() if text.strip())


def _python_topics() -> Iterator[tuple[str, str]]:
    """The help topics of the language reference, a document each.

    Long topics repeat paragraphs of shorter ones. A paragraph stays in the shortest topic that has it.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    own = {}
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        paragraphs = {" ".join(text.split()): text for text in re.split(r"\n\s*\n", topics[name])}
        own[name] = "\n\n".join(text for words, text in paragraphs.items() if words not in seen)
        seen.update(paragraphs)
    yield from sorted(own.items())


def _standard_library() -> Iterator[tuple[str, str]]:
    """Sources of the standard library's modules, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]  # not entered: packages hold the most files
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        try:
            yield path.relative_to(root).parts[0].removesuffix(".py"), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # some codec tables are written in other encodings


def docstrings(code: str) -> str:
    """The docstrings of a module's source, a blank line between them."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, documented))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


_BUILTIN = {
    "python_topics": _python_topics,
    "python_docstrings": lambda: ((package, docstrings(code)) for package, code in _standard_library()),
    "python_sources": _standard_library,
}
