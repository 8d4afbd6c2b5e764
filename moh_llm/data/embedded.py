"""Text that every Python ships, so that everything runs with no download and no licence question (PSF).

Each document has a group. Documents of one group are held out together, since they say the same: a
module's source and its docstrings, and the modules of one package, many of which are variants of each other.
"""

import ast
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Part of what identifies tokens of these sources: a cache of another split is not used.
SPLIT = "by package"


def embedded_documents(name: str) -> Iterator[tuple[str, str]]:
    """Group and text of the documents of a built-in source, in a fixed order; none is empty.

    Args:
        name: one of `moh_llm.data.mixture.BUILTIN_SOURCES`.
    """
    return ((group, text) for group, text in _BUILTIN[name]() if text.strip())


def _python_topics() -> Iterator[tuple[str, str]]:
    """The language reference's help topics, a document each.

    Long topics hold shorter ones, in whole or in part: a paragraph stays in the shortest topic that has it.
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
    """Sources of the standard library's own modules, tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]  # not entered: packages hold the most files
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        try:
            yield path.relative_to(root).parts[0].removesuffix(".py"), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a handful of codec tables are written in other encodings


def _python_docstrings() -> Iterator[tuple[str, str]]:
    """Per module, the docstrings of the module, its classes and functions."""
    yield from ((package, docstrings(code)) for package, code in _standard_library())


def docstrings(code: str) -> str:
    """The docstrings of a module's source, a blank line between them."""
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, _DOCUMENTED))
    return "\n\n".join(text for node in nodes if (text := ast.get_docstring(node)))


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BUILTIN = {
    "python_topics": _python_topics,
    "python_docstrings": _python_docstrings,
    "python_sources": _standard_library,
}
