"""The Python files that travel with a model: named by auto_map, flat, in need of torch and transformers only."""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moh_llm
from moh_llm.errors import UserError
from moh_llm.files import sha256
from moh_llm.hub.problem import Problem
from moh_llm.reading import read_json

_OWN = Path(moh_llm.__file__).parent / "modeling"
_OTHER_CODE = "save the model again with this version, or read the code and pass --allow-other-code"
AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
_LIBRARIES = {"torch", "transformers"}
_CONVERT = "convert the model again, or save it with moh_llm's classes"


def module_files(folder: Path) -> list[str]:
    """The files that `auto_map` names and those that they import beside them, sorted; absent ones are left out."""
    waiting = [f"{module}.py" for module, _, _ in _auto_map(folder).values()]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found and (folder / name).is_file():
            found.add(name)
            waiting += [f"{module}.py" for level, module, _ in _imports(folder / name) if level == 1 and module]
    return sorted(found)


def check_remote_code(folder: Path) -> list[Problem]:
    """What would keep the code from loading, or make it need more than torch and transformers."""
    problems = []
    auto_map = _auto_map(folder)
    for wanted in AUTO_CLASSES:
        if wanted not in auto_map:
            problems.append(Problem("config.json", f"auto_map has no {wanted}", _CONVERT))
    for wanted, (module, _, name) in auto_map.items():
        if not (folder / f"{module}.py").is_file():
            problems.append(Problem("config.json", f"auto_map names {module}.py for {wanted}, not there", _CONVERT))
        elif name not in _classes(folder / f"{module}.py"):
            problems.append(Problem(f"{module}.py", f"has no class {name}, which auto_map names", _CONVERT))
    for file in module_files(folder):
        problems += _check_imports(folder, file)
    return problems


def other_code(folder: Path) -> list[Problem]:
    """What loading the folder would run that is not this version's own code, by hash. Nothing is run to find out.

    Code is this version's when it has the bytes of the file of that name in `moh_llm.modeling`.
    """
    own = {path.name: sha256(path) for path in _OWN.glob("*.py") if path.name != "__init__.py"}
    problems = []
    for path in sorted(folder.rglob("*.py")):
        name, found = path.relative_to(folder).as_posix(), sha256(path)
        if found != own.get(name):
            theirs = f"whose file has {own[name][:16]}" if name in own else "which has no such file"
            what = f"has SHA-256 {found[:16]} and is not code of moh-llm {moh_llm.__version__}, {theirs}"
            problems.append(Problem(name, what, _OTHER_CODE, forceable=False))
    for name in ("config.json", "tokenizer_config.json"):
        for wanted, reference in _references(folder / name):
            if f"{reference.partition('.')[0]}.py" not in own:
                what = f"auto_map names {reference} for {wanted}, which is not code of moh-llm {moh_llm.__version__}"
                problems.append(Problem(name, what, _OTHER_CODE, forceable=False))
    return problems


def _references(path: Path) -> Iterator[tuple[str, str]]:
    """(Auto class, code that it names) of a JSON file's `auto_map`, however malformed."""
    try:
        content: Any = read_json(path)
    except UserError:
        return
    auto_map = content.get("auto_map") if isinstance(content, dict) else None
    # A tokenizer's is a pair (slow, fast), in old files without the name of the class.
    entries = auto_map.items() if isinstance(auto_map, dict) else [("AutoTokenizer", auto_map)]
    for wanted, named in entries:
        for reference in named if isinstance(named, list) else [named]:
            if reference is not None:
                yield str(wanted), str(reference)


def _auto_map(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Auto class -> (module, ".", class), of the entries that name both."""
    try:
        entries: Any = read_json(folder / "config.json").get("auto_map", {})
        return {str(key): str(value).partition(".") for key, value in entries.items()}
    except (UserError, AttributeError):
        return {}


def _check_imports(folder: Path, file: str) -> Iterator[Problem]:
    if _tree(folder / file) is None:
        yield Problem(file, "is not Python that parses", _CONVERT)
    for level, module, line in _imports(folder / file):
        top = module.partition(".")[0]
        if level == 0 and top not in _LIBRARIES and top not in sys.stdlib_module_names:
            yield Problem(file, f"line {line} imports {top}", "whoever loads the model has torch and transformers only")
        elif level > 1 or (level == 1 and not (folder / f"{module}.py").is_file()):
            yield Problem(file, f"line {line} imports {'.' * level}{module}, which is not beside it", _CONVERT)


def _imports(path: Path) -> list[tuple[int, str, int]]:
    """(dots, module, line) of every import anywhere in a file, but for those that it can do without."""
    return _imports_of(_tree(path) or ast.Module([], []))


@functools.lru_cache(maxsize=64)  # a tree is parsed once, see below, and asked several times
def _imports_of(tree: ast.Module) -> list[tuple[int, str, int]]:
    return list(_find_imports(tree))


def _find_imports(tree: ast.Module) -> Iterator[tuple[int, str, int]]:
    tried = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and _passes_over_absence(node)]
    spared = {id(inner) for node in tried for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in spared:
            continue
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level and node.module is None:
            yield from ((node.level, alias.name, node.lineno) for alias in node.names)  # from . import x
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", node.lineno


def _passes_over_absence(node: ast.Try) -> bool:
    return any("ImportError" in ast.dump(handler.type) for handler in node.handlers if handler.type is not None)


def _classes(path: Path) -> set[str]:
    tree = _tree(path)
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)} if tree else set()


def _tree(path: Path) -> ast.Module | None:
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)
