"""Sending a folder to the Hub: resumable, checked afterwards, and without a word of the token."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moh_llm.errors import UserError
from moh_llm.hub.stage import StagedFile
from moh_llm.hub.texts import redact

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What an earlier upload may have left that would be loaded beside, or instead of, the new files.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py"]
_OFFLINE = "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it"
_RESUME = "the same command goes on where it stopped"


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
    endpoint: str | None = None,
    say: Callable[[str], None] = print,
) -> str:
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
        endpoint: address of the Hub, where it is another than the library's.
        say: gets one line for each step.

    Returns:
        The address of what was uploaded.

    Raises:
        UserError: the Hub refuses, the connection breaks, or the Hub holds something else afterwards.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, token=token)
    with _told(repo_id, token):
        url = str(api.create_repo(repo_id, private=private or None, exist_ok=True))
        if private and not api.repo_info(repo_id).private:
            raise UserError(f"{repo_id} is public already; make it private on the Hub, or drop --private")
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        size = sum(file.size for file in files)
        say(f"uploading {len(files)} files, {size / 1e6:,.1f} MB, to {url}")
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            delete_patterns=_REPLACED,
            commit_message="Upload a Mixture-of-Head model",
        )
        _compare(api, repo_id, revision, folder, files)
    say(f"{len(files)} files on the Hub are those of the folder")
    return f"{url}/tree/{revision}" if revision else url


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
def _told(repo_id: str, token: str) -> Iterator[None]:
    """Turn what the library raises into one line that names the way out and hides the token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError(_OFFLINE) from error
    except PermissionError as error:  # hf_xet's word for a token that may not
        raise UserError(_refusal(repo_id, 403, _safe(error, token))) from error
    except (HTTPError, ConnectionError, TimeoutError, RuntimeError) as error:
        answer = next((cause for cause in _causes(error) if isinstance(cause, HfHubHTTPError)), None)
        if answer is None:
            raise UserError(f"the connection to the Hub broke ({_safe(error, token)}); {_RESUME}") from error
        status = answer.response.status_code
        said = _hide(answer.server_message or str(answer), token)
        raise UserError(_refusal(repo_id, status, f"{status}: {said}")) from error
    except ValueError as error:  # how the library tells that the Hub's validator refuses the card
        raise UserError(f"the Hub refuses {repo_id}: {_safe(error, token)}") from error


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


def _safe(error: BaseException, token: str) -> str:
    """What an error says, and what caused it, in one line without the token."""
    return _hide(": ".join(dict.fromkeys(filter(None, map(str, _causes(error))))), token)


def _hide(text: str, token: str) -> str:
    return redact(" ".join(text.split()).replace(token, "[hidden]"))[:300]
