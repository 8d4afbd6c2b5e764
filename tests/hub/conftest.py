"""In place of the Hub: the part of `HfApi` that an upload needs, in memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import clean_forks
import pytest
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError

TOKEN = "hf_" + "Ab3dEf6hIj9kLm2nOp5q" + "Rs8tUv1wXy4zAb"  # in two parts, so that no scanner takes it for one


class FakeHub:
    """What it holds and what it was asked.

    Attributes:
        branches: repository -> branch -> path -> content.
        private: repository -> whether it is private.
        requests: names of the calls, in order.
        refuse: status with which a repository is refused; None: it is not.
    """

    url = "https://hub"

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.requests: list[str] = []
        self.refuse: int | None = None

    def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> str:
        self.requests.append("create_repo")
        if self.refuse:
            response = SimpleNamespace(status_code=self.refuse, headers={}, request=None)
            # What a careless server might do: repeat the header that it was sent.
            raise HfHubHTTPError("refused", response=response, server_message=f"no: Bearer {TOKEN}")
        if repo_id not in self.branches:
            self.branches[repo_id] = {"main": {".gitattributes": b"*.safetensors filter=lfs\n"}}
            self.private[repo_id] = bool(private)
        return f"{self.url}/{repo_id}"

    def repo_info(self, repo_id: str) -> SimpleNamespace:
        return SimpleNamespace(private=self.private[repo_id])

    def create_branch(self, repo_id: str, branch: str, exist_ok: bool) -> None:
        branches = self.branches[repo_id]
        branches.setdefault(branch, dict(branches["main"]))

    def list_repo_files(self, repo_id: str, revision: str | None) -> list[str]:
        return [*self.branches[repo_id][revision or "main"]]

    def create_commit(
        self,
        repo_id: str,
        operations: list[CommitOperationAdd | CommitOperationDelete],
        commit_message: str,
        revision: str | None,
    ) -> SimpleNamespace:
        self.requests.append("create_commit")
        files = self.branches[repo_id][revision or "main"]
        for operation in operations:
            if isinstance(operation, CommitOperationAdd):
                files[operation.path_in_repo] = Path(operation.path_or_fileobj).read_bytes()
            else:
                del files[operation.path_in_repo]
        return SimpleNamespace(oid="1" * 40)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """What the package takes for the Hub, with a token."""
    hub = FakeHub()
    for name in ("create_repo", "repo_info", "create_branch", "list_repo_files", "create_commit"):
        monkeypatch.setattr(f"huggingface_hub.HfApi.{name}", getattr(hub, name))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


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

    record = {"compared": "the logits of 3 texts", "dtype": "float32", "seconds": 1.0}
    monkeypatch.setattr(
        "moh_llm.hub.publish.prove",
        lambda published, local: Proof(None, record | {"versions": {"transformers": "5"}}),
    )


@pytest.fixture
def forked_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof's clean process is forked, which leaves out the imports of a fresh one."""
    monkeypatch.setattr("moh_llm.hub.proof.subprocess", SimpleNamespace(run=clean_forks.run, DEVNULL=None))
