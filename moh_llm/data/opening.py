"""Sources of text: files, local or remote, compressed or not, and the text that every Python ships.

A truncated file is an error: some decompressors end without one, and a corpus would shrink unnoticed. The amount
that is decompressed ahead of the reader is bounded, however well the file is compressed.

Python's own text lets everything run with no download and no licence question (PSF). Each of its documents has a group.
Documents of one group are held out together, since they have the same content: a module's source and its docstrings,
and the modules of one package, many of which are variants of each other.
"""

import ast
import gzip
import importlib.util
import io
import os
import re
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from moh_llm.errors import UserError, shown

# Part of what identifies tokens of built-in text: a cache of another split is not used.
SPLIT = "by package"
_CHUNK = 1 << 16  # bytes read at once; small, so that the position in the stored file is about right
# Stored bytes that are decompressed at once. Four bytes can stand for a block of 128 KiB, so this makes 16 MiB at most.
_ZSTD_PIECE = 1 << 9
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def is_corruption(error: BaseException) -> bool:
    """Whether an error means corrupt or truncated data, and not, for example, a lost connection."""
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return True
    if type(error) is OSError and error.errno is None:  # how pyarrow puts it
        return True
    return type(error).__module__.split(".")[0] in ("zstandard", "zstd", "pyarrow")


def special_kind(path: str) -> str | None:
    """The kind of a local path that must not be opened, since reading it may never end ("a pipe"); None for others.

    Raises:
        OSError: nothing is there.
    """
    return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))


@contextmanager
def open_binary(path: str, seekable: bool = False) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Yield (the file as it is stored, its decompressed bytes); compression goes by the ending.

    Reading raises EOFError where the data end too early, and the decompressor's own error where
    they are corrupt.

    Args:
        path: local path or address.
        seekable: whether the reader seeks; if not, an address is read as one stream.

    Raises:
        UserError: the package for a format or a transport is missing, or the path is no file but a pipe or device.
    """
    with _open_raw(path, seekable) as raw:
        ending = shown(path).lower().rsplit(".", 1)[-1]
        if ending == "gz":
            with gzip.GzipFile(fileobj=raw) as plain:
                yield raw, io.BufferedReader(plain, _CHUNK)
        elif ending in ("zst", "zstd"):
            yield raw, io.BufferedReader(_ZstdFile(raw, path), _CHUNK)
        else:
            yield raw, raw


@contextmanager
def _open_raw(path: str, seekable: bool) -> Iterator[Any]:
    is_file_address = path.startswith(("file://", "local://"))
    if "://" not in path or is_file_address:
        kind = special_kind(path.partition("://")[2] if is_file_address else path)
        if kind is not None:
            raise UserError(f"{shown(path)} is {kind}, which is not read; name a file")
    if "://" not in path:
        with open(path, "rb") as file:
            yield file
        return
    import fsspec

    # A block size of 0 asks for one stream: some servers know neither sizes nor ranges.
    streamed = path.startswith(("http://", "https://")) and not seekable
    try:
        opened = fsspec.open(path, "rb", **({"block_size": 0} if streamed else {}))
    except ImportError as error:
        raise UserError(f'{shown(path)}: reading it needs a package ({error}); pip install "moh-llm[data]"') from error
    with opened as file:
        yield io.BufferedReader(_Stream(file), _CHUNK) if streamed else file


class _Stream(io.RawIOBase):
    """A stream without seeking, as a file that knows its position."""

    def __init__(self, raw: IO[bytes]):
        self._raw, self._position = raw, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _ZstdFile(io.RawIOBase):
    """Decompresses frame after frame; unlike `zstandard.stream_reader`, a frame without its end raises."""

    def __init__(self, raw: IO[bytes], name: str):
        if importlib.util.find_spec("zstandard") is None:
            raise UserError(f'{shown(name)}: reading it needs zstandard; pip install "moh-llm[data]"')
        import zstandard

        self._raw, self._context = raw, zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._rest = self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._rest = self._rest or memoryview(self._raw.read(_CHUNK))
            if not self._rest:
                if self._frame is not None:
                    raise EOFError("the data end before the end of the zstandard frame")
                return 0
            if self._frame is None:
                self._frame = self._context.decompressobj()
            piece = self._rest[:_ZSTD_PIECE]
            self._ready = memoryview(self._frame.decompress(piece))
            used = len(piece)
            if self._frame.eof:
                used, self._frame = used - len(self._frame.unused_data), None
            self._rest = self._rest[used:]
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def embedded_documents(name: str) -> Iterator[tuple[str, str]]:
    """Group and text of the documents of a built-in source, in a fixed order; none is empty.

    Args:
        name: that of a source's `builtin`.
    """
    return ((group, text) for group, text in _BUILTIN[name]() if text.strip())


def _python_topics() -> Iterator[tuple[str, str]]:
    """The language reference's help topics, a document each.

    Long topics contain shorter ones or parts of them: a paragraph stays in the shortest topic that has it.
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
