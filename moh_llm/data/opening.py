"""Opening a file, local or remote, compressed or not, such that what is cut short is an error.

Some decompressors end quietly where a file was truncated: a corpus then shrinks unnoticed. What is decompressed ahead
of the reader is bounded, however well the file is compressed.
"""

import gzip
import importlib.util
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from moh_llm.errors import UserError, shown

_CHUNK = 1 << 16  # bytes read at once; small, so that the position in the stored file tells something
# Stored bytes that are decompressed at once. Four bytes can stand for a block of 128 KiB, so this makes 16 MiB at most.
_ZSTD_PIECE = 1 << 9
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def is_corruption(error: BaseException) -> bool:
    """Whether an error says that data are corrupt or cut short, and not, say, that a server went away."""
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return True
    if type(error) is OSError and error.errno is None:  # how pyarrow puts it
        return True
    return type(error).__module__.split(".")[0] in ("zstandard", "zstd", "pyarrow")


def special_kind(path: str) -> str | None:
    """What a local path is that must not be opened, since reading it may never end: "a pipe", say; None for others.

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
        seekable: whether the reader jumps about; else an address is read as one stream.

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
    """What can only be read on and on, as a file that knows where it is."""

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
    """Decompress frame after frame; unlike `zstandard.stream_reader`, a frame without its end raises."""

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
