"""Uploading a model: the copy of its folder that is uploaded, and one commit on the Hub. No message holds the token."""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.files import scratch_folder, sha256, write_text
from moh_llm.hub.checks import CARD, RECORDS, scrub_json
from moh_llm.hub.secrets import redact
from moh_llm.locking import lock_folder
from moh_llm.reading import read_json
from moh_llm.terminal import say

# Files of an earlier upload that would be loaded beside, or instead of, the new ones.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py"]
_OFFLINE = "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it"
_RESUME = "run the same command again to resume"


@dataclass(frozen=True)
class UploadedFile:
    """A file of an upload: its size in bytes and the SHA-256 of its content in hex."""

    name: str
    size: int
    sha256: str


@contextlib.contextmanager
def upload_copy(folder: Path, files: list[str], added: Mapping[str, Path]) -> Iterator[tuple[Path, list[str]]]:
    """Make a temporary copy of a model's folder to upload, without its card.

    Files without local paths are links: replace files of the copy, never write into them.

    Args:
        folder: the model.
        files: names of its files that are published.
        added: more files for the copy, by the name they get.

    Yields:
        The copy, and the names of the files in which local paths were cut to their last component.

    Raises:
        UserError: a record cannot be read, another process writes or publishes the model, or the disk refuses.
    """
    sources = {name: folder / name for name in files if name != CARD} | dict(added)
    with lock_folder(folder), scratch_folder(folder.resolve()) as copy:
        scrubbed = []
        for name, source in sources.items():
            (copy / name).parent.mkdir(exist_ok=True)
            if (text := _scrubbed(name, source)) is None:
                (copy / name).symlink_to(source.resolve())
            else:
                scrubbed.append(name)
                write_text(copy / name, text)
        yield copy, scrubbed


def _scrubbed(name: str, source: Path) -> str | None:
    """The text of a record or config without local paths; None where it has none.

    In configs only the fields where `save_pretrained` writes paths change: a chat template, say, must stay as it is.
    """
    if name not in (*RECORDS, "config.json", "tokenizer_config.json"):
        return None
    content = read_json(source)
    if name in RECORDS:
        scrubbed = scrub_json(content)
    elif isinstance(content, dict):
        paths = {key: scrub_json(content[key]) for key in ("_name_or_path", "name_or_path") if key in content}
        scrubbed = content | paths
    else:
        return None
    return None if scrubbed == content else json.dumps(scrubbed, indent=2, ensure_ascii=False) + "\n"


def describe(folder: Path) -> list[UploadedFile]:
    """Every file of a folder, by name. Raises FileNotFoundError when the folder was removed."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [UploadedFile(path.relative_to(folder).as_posix(), path.stat().st_size, sha256(path)) for path in paths]


def check_repo_id(repo_id: str) -> None:
    """Raise UserError unless a name has the form ``ORG/NAME`` that the Hub accepts."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id} cannot be a repository: {' '.join(str(error).split())}") from error
    if "/" not in repo_id:
        raise UserError(f"{repo_id} cannot be a repository: it needs an owner, ORG/NAME")


def find_token() -> str:
    """The user's token for the Hub. Raises UserError if there is none, or if HF_HUB_OFFLINE is set."""
    from huggingface_hub import get_token, is_offline_mode

    if is_offline_mode():
        raise UserError(_OFFLINE)
    token = get_token()
    if token is None:
        raise UserError("there is no token for the Hub; run `hf auth login`, or set HF_TOKEN to one with write access")
    return token


def push(
    folder: Path,
    files: list[UploadedFile],
    repo_id: str,
    token: str,
    private: bool = False,
    revision: str | None = None,
    say: Callable[[str], None] = say,
) -> tuple[str, str]:
    """Upload a folder in one commit; create repository and branch if absent.

    The commit comes last, so an interrupted upload changes nothing that the repository shows; repeated, it sends only
    the weights that the Hub lacks. Weights and code that the folder does not have are deleted in the same commit;
    other files stay.

    Args:
        folder: the files to upload.
        files: `describe` of it.
        repo_id: ``ORG/NAME``.
        token: the user's.
        private: make the repository private; one that is public already is refused.
        revision: branch; None: ``main``.
        say: gets one line for each step.

    Returns:
        The address of the upload, and the commit.

    Raises:
        UserError: the Hub refuses, or the connection breaks.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import filter_repo_objects

    api, names = HfApi(token=token), {file.name for file in files}
    with _one_line(repo_id):
        url = str(api.create_repo(repo_id, private=private or None, exist_ok=True))
        if private and not api.repo_info(repo_id).private:
            raise UserError(f"{repo_id} is public already; make it private on the Hub, or drop --private")
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        size = sum(file.size for file in files)
        say(f"uploading {len(files)} files, {size / 1e6:,.1f} MB, to {url}")
        # Not `upload_folder`, which may make several commits.
        stale = filter_repo_objects(api.list_repo_files(repo_id, revision=revision), allow_patterns=_REPLACED)
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, folder / name) for name in sorted(names)),
                *(CommitOperationDelete(name) for name in stale if name not in names),
            ],
            commit_message="Upload a Mixture-of-Head model",
            revision=revision,
        )
    return (f"{url}/tree/{revision}" if revision else url), commit.oid


@contextlib.contextmanager
def _one_line(repo_id: str) -> Iterator[None]:
    """Turn the library's errors into a UserError of one line that says what to do, without the token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(_OFFLINE) from error
    except PermissionError as error:  # how hf_xet reports a token without write access
        raise UserError(_refusal(repo_id, 403, _message(error))) from error
    except (HTTPError, ConnectionError, TimeoutError, RuntimeError) as error:
        answer = next((cause for cause in _causes(error) if isinstance(cause, HfHubHTTPError)), None)
        if answer is None:
            raise UserError(f"the connection to the Hub broke ({_message(error)}); {_RESUME}") from error
        status = answer.response.status_code
        message = f"{status}: {_hide(answer.server_message or str(answer))}"
        raise UserError(_refusal(repo_id, status, message)) from error
    except ValueError as error:  # how the library reports a card that the Hub's validator refuses
        raise UserError(f"the Hub refuses {repo_id}: {_message(error)}") from error


def _refusal(repo_id: str, status: int, message: str) -> str:
    low = message.lower()
    if status in (402, 413, 507) or "quota" in low or "storage limit" in low:
        return f"the Hub has no space for {repo_id} ({message}); free some, or name another owner; {_RESUME}"
    if status == 401:
        return f"the Hub does not accept the token, or {repo_id} does not exist ({message}); run `hf auth login`"
    if status in (403, 404):
        return f"the token may not write to {repo_id} ({message}); use one that may, or name another owner"
    if status == 429 or status >= 500:
        return f"the Hub cannot answer now ({message}); {_RESUME} later"
    return f"the Hub refuses {repo_id}: {message}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _message(error: BaseException) -> str:
    """An error's message and those of its causes."""
    return _hide(": ".join(dict.fromkeys(filter(None, map(str, _causes(error))))))


def _hide(text: str) -> str:
    """One line without the token."""
    return redact(" ".join(text.split()))[:300]
