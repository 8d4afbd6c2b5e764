"""A local server in place of the Hub: the part of its HTTP interface that an upload needs, in memory, in a thread."""

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clean_forks
import pytest
import yaml

TOKEN = "hf_" + "Ab3dEf6hIj9kLm2nOp5q" + "Rs8tUv1wXy4zAb"  # in two parts, so that no scanner takes it for one


class FakeHub:
    """What it holds and what it was asked.

    Attributes:
        branches: repository -> branch -> path -> content.
        private: repository -> whether it is private.
        objects: large files by SHA-256, sent but not necessarily in a commit.
        requests: `METHOD path` in the order of arrival, without queries.
        refuse: status with which every writing request is answered; None for none.
    """

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuse: int | None = None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def asked(self, pattern: str) -> list[str]:
        """The requests that match a pattern, in order."""
        return [request for request in self.requests if re.search(pattern, request)]


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _oid(path: str, content: bytes) -> str:
    if _is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _serve(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            body = self._body()
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" and self.command != "PUT":
                return self._answer(401, {"error": "Invalid username or password."})
            if hub.refuse and self.command == "POST" and not path.endswith("validate-yaml"):
                # What a careless server might do: repeat the header that it was sent.
                return self._answer(hub.refuse, {"error": f"no: {self.headers.get('Authorization')}"})
            for pattern, answer in _ROUTES.items():
                if found := re.fullmatch(pattern, f"{self.command} {path}"):
                    return self._answer(*answer(hub, body, *found.groups()))
            self._answer(404, {"error": f"unknown: {self.command} {path}"})

        do_GET = do_POST = do_PUT = _serve

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, status: int, content: Any) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def _create(hub: FakeHub, body: bytes) -> tuple[int, Any]:
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}"
    known = name in hub.branches
    if not known:
        hub.branches[name] = {"main": {".gitattributes": b"*.safetensors filter=lfs\n"}}
        hub.private[name] = asked.get("visibility") == "private"
    return (409 if known else 200), {"url": f"{hub.url}/{name}"}


def _info(hub: FakeHub, body: bytes, name: str) -> tuple[int, Any]:
    if name not in hub.private:
        return 404, {"error": "Repository not found"}
    return 200, {"id": name, "private": hub.private[name], "sha": "0" * 40, "siblings": []}


def _branch(hub: FakeHub, body: bytes, name: str, branch: str) -> tuple[int, Any]:
    branches = hub.branches[name]
    known = branch in branches
    branches.setdefault(branch, dict(branches["main"]))
    return (409 if known else 200), {}


def _tree(hub: FakeHub, body: bytes, name: str, branch: str) -> tuple[int, Any]:
    entries = []
    for path, content in hub.branches[name][branch].items():
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
        if _is_large(path):
            entry["lfs"] = {"oid": _oid(path, content), "size": len(content), "pointerSize": 134}
        else:
            entry["oid"] = _oid(path, content)
        entries.append(entry)
    return 200, entries


def _preupload(hub: FakeHub, body: bytes, name: str, branch: str) -> tuple[int, Any]:
    held = hub.branches[name][branch]
    modes = []
    for file in json.loads(body)["files"]:
        path = file["path"]
        oid = _oid(path, held[path]) if path in held else None
        mode = "lfs" if _is_large(path) else "regular"
        modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return 200, {"files": modes}


def _batch(hub: FakeHub, body: bytes, name: str) -> tuple[int, Any]:
    objects = []
    for file in json.loads(body)["objects"]:
        if file["oid"] not in hub.objects:
            file["actions"] = {"upload": {"href": f"{hub.url}/storage/{file['oid']}"}}
        objects.append(file)
    return 200, {"transfer": "basic", "objects": objects}


def _store(hub: FakeHub, body: bytes, oid: str) -> tuple[int, Any]:
    assert hashlib.sha256(body).hexdigest() == oid
    hub.objects[oid] = body
    return 200, {}


def _commit(hub: FakeHub, body: bytes, name: str, branch: str) -> tuple[int, Any]:
    files = hub.branches[name][branch]
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            if value["oid"] not in hub.objects:
                return 400, {"error": f"{value['path']} was not sent"}
            files[value["path"]] = hub.objects[value["oid"]]
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    return 200, {"success": True, "commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40}


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: dict[str, Callable[..., tuple[int, Any]]] = {
    "POST /api/repos/create": _create,
    "POST /api/validate-yaml": lambda hub, body: (200, {"errors": [], "warnings": []}),
    f"GET /api/models/{_NAME}(?:/revision/[^/]+)?": _info,
    f"POST /api/models/{_NAME}/branch/([^/]+)": _branch,
    f"GET /api/models/{_NAME}/tree/([^/]+)": _tree,
    f"POST /api/models/{_NAME}/preupload/([^/]+)": _preupload,
    rf"POST /{_NAME}\.git/info/lfs/objects/batch": _batch,
    "PUT /storage/([0-9a-f]+)": _store,
    f"POST /api/models/{_NAME}/commit/([^/]+)": _commit,
}


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A local server that the library takes for the Hub, with a token that it accepts."""
    hub = FakeHub()
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its attempts
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture(scope="session")
def moh_model(
    make_llama: Callable[..., Path], convert: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A LLaMA as `moh-llm convert --fallback value` makes it, in two shards with a licence, not to be changed.

    Without the record of its conversion: tests write the one that they need.
    """
    base = make_llama(num_attention_heads=8, hidden_size=64, max_position_embeddings=2048, initializer_range=0.1)
    folder = tmp_path_factory.mktemp("hub") / "moh"
    assert convert(base, folder, "--context", "512", "--fallback", "value", "--heldout-tokens", "0") == 0
    (folder / "conversion.json").unlink()
    (folder / "seal.json").unlink()
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n\nA model.\n")
    config = json.loads((folder / "config.json").read_text())
    assert (config["router_type"], config["head_fallback"]) == ("linear", "value")
    assert len([*folder.glob("*.safetensors")]) == 2
    return folder


@pytest.fixture
def folder(moh_model: Path, tmp_path: Path) -> Path:
    """A copy of `moh_model`."""
    return Path(shutil.copytree(moh_model, tmp_path / "moh"))


@pytest.fixture
def recipe(moh_model: Path, river: Path, tmp_path: Path, one_thread: None) -> Path:
    """A training recipe of 4 short steps that writes to `tmp_path/run` and publishes to org/moh."""
    mixture = {"name": "tiny", "sources": {"river": {"weight": 1, "files": str(river)}}}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    content = {
        "model": str(moh_model),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 4,
        "data": {"mixture": str(tmp_path / "mixture.yaml"), "sequence_length": 32, "batch_size": 2},
        "evaluation": {"eval_steps": 2, "max_tokens": 128},
        "checkpoint": {"save_steps": 2},
        "hub": {"repo_id": "org/moh"},
        "report_to": [],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "recipe.yaml"


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of this process, which takes seconds, is taken as given."""
    from moh_llm.hub.proof import Proof

    record = {"texts": 3, "tokens": 99, "dtype": "float32", "seconds": 1.0, "generated": ["so it goes"]}
    monkeypatch.setattr(
        "moh_llm.hub.publish.prove",
        lambda published, local: Proof(None, record | {"versions": {"transformers": "5"}}),
    )


@pytest.fixture
def forked_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof's clean process is forked, which leaves out the imports of a fresh one."""
    monkeypatch.setattr("moh_llm.hub.proof.subprocess", SimpleNamespace(run=clean_forks.run, DEVNULL=None))


@pytest.fixture
def reached(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What leads other processes to the server."""
    settings = {"HF_ENDPOINT": fake_hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
