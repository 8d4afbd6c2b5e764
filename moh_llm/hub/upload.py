"""Sending a model to the Hub: the folder that is uploaded, an upload that is resumable and compared afterwards.

No message holds the token.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moh_llm.errors import UserError
from moh_llm.files import scratch_folder, sha256, write_text
from moh_llm.hub.checks import CARD, RECORDS
from moh_llm.hub.texts import redact, scrub, scrub_json
from moh_llm.locking import lock_folder
from moh_llm.reading import read_json

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What an earlier upload may have left that would be loaded beside, or instead of, the new files.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py"]
_OFFLINE = "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it"
_RESUME = "the same command goes on where it stopped"


@dataclass
class Stage:
    """The folder that is uploaded.

    Attributes:
        folder: where it lies, as long as the block of `staged` runs.
        scrubbed: files in which paths of this machine were cut to their last component.
    """

    folder: Path
    scrubbed: list[str] = field(default_factory=list)

    def write_card(self, text: str) -> None:
        """Write README.md, without paths of this machine."""
        write_text(self.folder / CARD, scrub(text))


@dataclass(frozen=True)
class StagedFile:
    """One file of a stage: its size in bytes and the SHA-256 of its content in hex."""

    name: str
    size: int
    sha256: str


@contextlib.contextmanager
def staged(folder: Path, files: list[str], records: Mapping[str, Path]) -> Iterator[Stage]:
    """Yield a copy of a model's folder to publish; it is removed at the end, and the model's own stays as it was.

    The card is missing yet (`Stage.write_card`). Nothing in the copy may be written in place, since its files are
    links where the text is unchanged.

    Args:
        folder: the model.
        files: names of its files that are published; a card among them is left out.
        records: more files to put in, by the name they get: where they lie.

    Raises:
        UserError: a record cannot be read; the model is being written or published by another process; the disk
            refuses.
    """
    sources = {name: folder / name for name in files if name != CARD} | dict(records)
    with lock_folder(folder), scratch_folder(folder.resolve()) as temporary:
        stage = Stage(temporary)
        for name, source in sources.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            if (text := _scrubbed(name, source)) is None:
                _link(source, temporary / name)
            else:
                stage.scrubbed.append(name)
                write_text(temporary / name, text)
        yield stage


def describe(folder: Path) -> list[StagedFile]:
    """Every file of a stage, by name. Raises FileNotFoundError where the folder is gone."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [StagedFile(path.relative_to(folder).as_posix(), path.stat().st_size, sha256(path)) for path in paths]


def _scrubbed(name: str, source: Path) -> str | None:
    """The text of a record, config or tokenizer's config without local paths; None where it has none.

    Only records may change anywhere: a chat template, say, may name a path, and must stay as the model knows it.
    """
    if name not in (*RECORDS, "config.json", "tokenizer_config.json"):
        return None
    content = read_json(source)
    if name in RECORDS:
        scrubbed = scrub_json(content)
    elif isinstance(content, dict):  # save_pretrained writes where it loaded from
        scrubbed = content | {
            key: scrub_json(content[key]) for key in ("_name_or_path", "name_or_path") if key in content
        }
    else:
        return None
    return None if scrubbed == content else json.dumps(scrubbed, indent=2, ensure_ascii=False) + "\n"


def _link(source: Path, target: Path) -> None:
    real = source.resolve()  # a Hub snapshot holds symbolic links
    try:
        os.link(real, target)
    except OSError:  # not on every file system, nor for everybody's files
        try:
            target.symlink_to(real)
        except OSError:
            shutil.copyfile(real, target)


def check_repo_id(repo_id: str) -> None:
    """Raise UserError unless a name has the form ``ORG/NAME`` that the Hub takes."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id} cannot be a repository: {' '.join(str(error).split())}") from error
    if "/" not in repo_id:
        raise UserError(f"{repo_id} cannot be a repository: it needs an owner, ORG/NAME")


def find_token() -> str:
    """The user's token for the Hub, of HF_TOKEN or of ``hf auth login``.

    Raises:
        UserError: there is none, or HF_HUB_OFFLINE forbids to use it.
    """
    from huggingface_hub import get_token, is_offline_mode

    if is_offline_mode():
        raise UserError(_OFFLINE)
    token = get_token()
    if token is None:
        raise UserError("there is no token for the Hub; run `hf auth login`, or set HF_TOKEN to one that may write")
    return token


def push(
    folder: Path,
    files: list[StagedFile],
    repo_id: str,
    token: str,
    private: bool = False,
    revision: str | None = None,
    say: Callable[[str], None] = print,
) -> tuple[str, str]:
    """Make the repository and branch where they are absent, upload a folder, and compare what then lies there.

    An upload that broke off is resumed by the same call: what the Hub has is not sent again. Weights
    and code that an earlier upload left and this folder has not are removed; other files are let be.

    Args:
        folder: what to upload, all of it.
        files: what `describe` says of it.
        repo_id: ``ORG/NAME``.
        token: the user's; it is in no message.
        private: make the repository private; one that is public already is refused.
        revision: branch; by default ``main``.
        say: gets one line for each step.

    Returns:
        The address of what was uploaded, and the commit.

    Raises:
        UserError: the Hub refuses, the connection breaks, or the Hub holds something else afterwards.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with _one_line(repo_id):
        url = str(api.create_repo(repo_id, private=private or None, exist_ok=True))
        if private and not api.repo_info(repo_id).private:
            raise UserError(f"{repo_id} is public already; make it private on the Hub, or drop --private")
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        size = sum(file.size for file in files)
        say(f"uploading {len(files)} files, {size / 1e6:,.1f} MB, to {url}")
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            delete_patterns=_REPLACED,
            commit_message="Upload a Mixture-of-Head model",
        )
        _compare(api, repo_id, revision, folder, files)
    say(f"{len(files)} files on the Hub are those of the folder")
    return (f"{url}/tree/{revision}" if revision else url), commit.oid


def _compare(api: "HfApi", repo_id: str, revision: str | None, folder: Path, files: list[StagedFile]) -> None:
    """Raise UserError unless the Hub lists every file with its content, and no other weights or code."""
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import filter_repo_objects
    from huggingface_hub.utils.sha import git_hash

    listed = {
        entry.path: entry
        for entry in api.list_repo_tree(repo_id, recursive=True, revision=revision)
        if isinstance(entry, RepoFile)
    }
    for file in files:
        entry = listed.get(file.name)
        if entry is None:
            raise UserError(f"{repo_id} lacks {file.name} after the upload; {_RESUME}")
        if entry.lfs is not None:
            same = (entry.lfs.size, entry.lfs.sha256) == (file.size, file.sha256)
        else:
            same = entry.blob_id == git_hash((folder / file.name).read_bytes())
        if not same:
            raise UserError(f"{file.name} in {repo_id} is not what was sent; repeat the command")
    stale = set(filter_repo_objects(listed, allow_patterns=_REPLACED)) - {file.name for file in files}
    if stale:
        raise UserError(f"{repo_id} holds {min(stale)} of another upload; remove it there")


@contextlib.contextmanager
def _one_line(repo_id: str) -> Iterator[None]:
    """Turn what the library raises into one line that names the way out, without the token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(_OFFLINE) from error
    except PermissionError as error:  # hf_xet's word for a token that may not
        raise UserError(_refusal(repo_id, 403, _said(error))) from error
    except (HTTPError, ConnectionError, TimeoutError, RuntimeError) as error:
        answer = next((cause for cause in _causes(error) if isinstance(cause, HfHubHTTPError)), None)
        if answer is None:
            raise UserError(f"the connection to the Hub broke ({_said(error)}); {_RESUME}") from error
        status = answer.response.status_code
        said = f"{status}: {_hide(answer.server_message or str(answer))}"
        raise UserError(_refusal(repo_id, status, said)) from error
    except ValueError as error:  # how the library tells that the Hub's validator refuses the card
        raise UserError(f"the Hub refuses {repo_id}: {_said(error)}") from error


def _refusal(repo_id: str, status: int, said: str) -> str:
    low = said.lower()
    if status in (402, 413, 507) or "quota" in low or "storage limit" in low:
        return f"the Hub has no room for {repo_id} ({said}); free some, or name another owner; {_RESUME}"
    if status == 401:
        return f"the Hub does not know the token, or not {repo_id} ({said}); run `hf auth login`"
    if status in (403, 404):
        return f"the token may not write to {repo_id} ({said}); use one that may, or name another owner"
    if status == 429:
        return f"the Hub asks to wait ({said}); later, {_RESUME}"
    if status >= 500:
        return f"the Hub failed ({said}); {_RESUME}"
    return f"the Hub refuses {repo_id}: {said}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _said(error: BaseException) -> str:
    """What an error says, and what caused it."""
    return _hide(": ".join(dict.fromkeys(filter(None, map(str, _causes(error))))))


def _hide(text: str) -> str:
    """One line without the token."""
    return redact(" ".join(text.split()))[:300]
