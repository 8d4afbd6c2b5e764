"""Uploading, against a local server in place of the Hub."""

import pytest

from moh_llm.errors import UserError
from moh_llm.hub.publish import check_repo_id, find_token, push


@pytest.fixture
def token(fake_hub) -> str:
    return find_token()


def _push(folder, token, **options):
    url, commit = push(folder, "org/moh", token, **options)
    assert commit in ("0" * 40, "1" * 40)  # none where nothing changed
    return url


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_weights_are_sent_before_the_one_commit(folder, fake_hub, token):
    url = _push(folder, token)
    held = fake_hub.branches["org/moh"]["main"]
    assert {name: held[name] for name in held if name != ".gitattributes"} == _content(folder)
    assert url == f"{fake_hub.url}/org/moh"
    order = [request.split()[0] + " " + request.split("/")[-2] for request in fake_hub.requests]
    assert order.count("PUT storage") == len([*folder.glob("*.safetensors")]) and order.count("POST commit") == 1
    assert order[-1] == "POST commit"


def test_weights_and_code_of_an_earlier_upload_are_deleted_and_other_files_stay(folder, fake_hub, token):
    _push(folder, token)
    held = fake_hub.branches["org/moh"]["main"]
    held |= {"model.safetensors": b"old", "old_code.py": b"old", "picture.png": b"a picture", "config.json": b"old"}
    _push(folder, token)
    assert set(held) == {*_content(folder), ".gitattributes", "picture.png"}
    assert held["config.json"] == _content(folder)["config.json"]


def test_a_branch_is_made_and_main_stays_as_it_is(folder, fake_hub, token):
    for _ in range(2):
        url = _push(folder, token, revision="step-100")
    assert url.endswith("/org/moh/tree/step-100")
    branches = fake_hub.branches["org/moh"]
    assert set(branches["main"]) == {".gitattributes"}
    assert set(branches["step-100"]) == {*_content(folder), ".gitattributes"}


def test_private_is_private_or_refused(folder, fake_hub, token):
    _push(folder, token, private=True)
    assert fake_hub.private["org/moh"]
    fake_hub.private["org/moh"] = False
    with pytest.raises(UserError, match="org/moh is public already"):
        _push(folder, token, private=True)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "run `hf auth login`"),
        (402, "has no space for org/moh"),
        (403, "the token may not write to org/moh"),
        (400, "the Hub refuses org/moh"),
        (500, "run the same command again to resume later"),
        (None, "connection to the Hub broke"),
    ],
)
def test_refusals_say_what_to_do_and_hide_the_token(folder, fake_hub, token, monkeypatch, status, says):
    fake_hub.refuse = status
    if status is None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError) as failure:
        _push(folder, token)
    message = str(failure.value)
    assert says in message and "\n" not in message and token not in message


@pytest.mark.parametrize("name", ["moh", "org/moh/x", "org/mo h", "org/-moh", ""])
def test_names_that_cannot_be_a_repository(name):
    with pytest.raises(UserError, match="cannot be a repository"):
        check_repo_id(name)
