"""Where sources lie: globs, lists of addresses, servers and the Hub, and the files that are read from there."""

import gzip
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fsspec.implementations.dirfs import DirFileSystem

from moh_llm.data.locate import SourceFile, locate
from moh_llm.data.mixture import Source, load_mixture
from moh_llm.data.records import source_documents
from moh_llm.errors import UserError

DOCUMENTS = [f"document {i} of a river that was high that spring" for i in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()
REGISTRY = sys.modules["fsspec.registry"]._registry  # of protocols; its public name is a read-only view


def packed(name: str) -> bytes:
    if name.endswith(".zst"):
        return pytest.importorskip("zstandard").compress(LINES)
    return gzip.compress(LINES) if name.endswith(".gz") else LINES


class Handler(BaseHTTPRequestHandler):
    """/HOW/NAME: `ranges` or `plain` files, without their length (`stream`), half of them (`short`), a status.

    `403get` says that a file is there and does not give it.
    """

    def do_GET(self):
        how, name = urlsplit(self.path).path[1:].split("/", 1)
        if self.command == "GET":
            how = how.removesuffix("get")
        if how.isdigit() or name not in self.server.files:
            self.send_error(int(how) if how.isdigit() else 404)
            return
        body = self.server.files[name]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if how == "ranges" and asked:
            start, stop = int(asked[1]), min(int(asked[2] or len(body)) + 1, len(body))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
            body = body[start:stop]
        else:
            self.send_response(200)
        if how != "stream":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if how == "short" else body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of a server that has the documents as a.jsonl, a.jsonl.gz and a.jsonl.zst, and two lists."""
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files = {name: packed(name) for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst")}
        server.files["list.txt"] = "# all\r\nhttps://h/en/ä.jsonl\r\n\r\n  https://h/de/b.jsonl\r\n".encode()
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def paths(**location) -> list[str]:
    return [file.path for file in locate(Source("web", 1.0, **location))]


def refusal(**location) -> str:
    with pytest.raises(UserError) as error:
        paths(**location)
    assert "\n" not in str(error.value)
    return str(error.value)


def read(path: str) -> list[str]:
    return [text for _, text in source_documents(Source("web", 1.0), [SourceFile(path)])]


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_globs_are_sorted_and_recursive(tmp_path):
    names = ["b.jsonl", "a.jsonl", "c/d.jsonl", "c/e/a.jsonl", "B.jsonl", "10.jsonl", "9.jsonl", "a.txt"]
    fill(tmp_path, *names)
    (tmp_path / "folder.jsonl").mkdir()
    found = paths(files=(f"{tmp_path}/**/*.jsonl",))
    assert found == sorted(f"{tmp_path}/{name}" for name in names if name != "a.txt")
    # One pattern after the other, as they are given; a file that is named twice is read once.
    found = paths(files=(f"{tmp_path}/c/*.jsonl", f"{tmp_path}/[ab].*", f"{tmp_path}/a.txt"))
    assert found == [f"{tmp_path}/{name}" for name in ("c/d.jsonl", "a.jsonl", "a.txt", "b.jsonl")]
    # Also where it is in a folder beside the mixture's.
    (tmp_path / "c" / "mixture.yaml").write_text("sources: {web: {weight: 1, files: [../a.jsonl, '../*.jsonl']}}")
    (source,) = load_mixture(tmp_path / "c" / "mixture.yaml").sources
    assert len(locate(source)) == 5


@pytest.mark.parametrize("name", ["*.jsonl", "folder"])
def test_nothing_there(tmp_path, name):
    fill(tmp_path, "a.txt")
    (tmp_path / "folder").mkdir()
    wanted = (f"{tmp_path}/a.txt", f"{tmp_path}/{name}")
    assert refusal(files=wanted) == f"source web: no file at {tmp_path}/{name}"


@pytest.mark.parametrize("how", ["plain", "stream"])
def test_lists_of_addresses(tmp_path, site, how):
    local = tmp_path / "the list.txt"
    local.write_bytes("\ufeff# all\nhttps://h/en/ä.jsonl\n\n  https://h/de/b.jsonl  ".encode())
    for url_list in (str(local), f"{site}/{how}/list.txt"):
        assert paths(url_list=url_list) == ["https://h/en/ä.jsonl", "https://h/de/b.jsonl"]
        assert paths(url_list=url_list, match="*/en/*") == ["https://h/en/ä.jsonl"]
        assert refusal(url_list=url_list, match="*/EN/*").endswith("list.txt holds no address that matches */EN/*")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("how", ["ranges", "stream"])
def test_files_on_a_server(site, how, name):
    assert read(f"{site}/{how}/{name}?file=v1.txt") == DOCUMENTS  # a query does not change the format


@pytest.mark.parametrize("how", ["404", "403get", "short"])
def test_files_that_a_server_does_not_give(site, how):
    url = f"{site}/{how}/a.jsonl.gz"
    with pytest.raises(UserError) as error:
        read(url.replace("//", "//user:hidden@") + "?key=hidden")
    assert str(error.value).startswith(f"{url} ")
    assert "\n" not in str(error.value) and "hidden" not in str(error.value)


def test_what_a_server_cuts_short_stops(site):
    with pytest.raises(UserError, match=r"/short/a\.jsonl cannot be read past record \d+: "):
        read(f"{site}/short/a.jsonl")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A folder that stands for the Hub."""

    class Hub(DirFileSystem):
        protocol = "hf"
        cachable = False

        def __init__(self, **kwargs):
            super().__init__(path=str(tmp_path), target_protocol="file", **kwargs)

        def glob(self, path, **kwargs):
            found = super().glob(path, **kwargs)
            return {name: found[name] | {"blob_id": f"hash of {name}"} for name in sorted(found, reverse=True)}

    monkeypatch.setitem(REGISTRY, "hf", Hub)
    return tmp_path / "datasets" / "org"


def test_files_on_the_hub(hub):
    fill(hub / "name", "data/b.jsonl", "data/a.jsonl", "data/c/d.jsonl", "data/a.md", "e.jsonl/f.txt")
    names = ["e.jsonl/f.txt", "data/a.jsonl", "data/b.jsonl"]
    files = locate(Source("web", 1.0, hub="org/name", data_files=("*/f.txt", "data/*.jsonl")))
    assert files == [
        SourceFile(f"hf://datasets/org/name/{name}", len(name), f"hash of datasets/org/name/{name}") for name in names
    ]
    assert len(paths(hub="org/name", data_files=("**/*.jsonl",))) == 3  # the folder e.jsonl is none


@pytest.mark.parametrize(("revision", "folder"), [("v2", "name@v2"), ("my/branch", "name@my%2Fbranch")])
def test_a_revision_on_the_hub(hub, revision, folder):
    """As huggingface_hub takes it: behind an @, its slashes quoted."""
    fill(hub, "name/a.jsonl")
    (hub / folder).mkdir()
    (hub / folder / "a.jsonl.gz").write_bytes(packed("a.jsonl.gz"))
    (found,) = paths(hub="org/name", data_files=("*.jsonl*",), revision=revision)
    assert found == f"hf://datasets/org/{folder}/a.jsonl.gz"
    assert read(found) == DOCUMENTS
