"""Uploading, against a local server in place of the Hub."""

import pytest

from moh_llm.errors import UserError
from moh_llm.hub.upload import check_repo_id, describe, find_token, push


@pytest.fixture
def token(fake_hub) -> str:
    return find_token()


def _push(folder, token, **options):
    lines = []
    url, commit = push(folder, describe(folder), "org/moh", token, say=lines.append, **options)
    assert commit in ("0" * 40, "1" * 40)
    return url, lines


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_weights_are_sent_before_the_one_commit(folder, fake_hub, token):
    url, lines = _push(folder, token)
    held = fake_hub.branches["org/moh"]["main"]
    assert {name: held[name] for name in held if name != ".gitattributes"} == _content(folder)
    assert url == f"{fake_hub.url}/org/moh"
    order = [request.split()[0] + " " + request.split("/")[-2] for request in fake_hub.requests]
    assert order.count("PUT storage") == len([*folder.glob("*.safetensors")]) and order.count("POST commit") == 1
    assert order[-1] == "POST commit"
    assert any(f"{len(_content(folder))} files" in line for line in lines)


def test_a_broken_connection_is_reported_and_the_same_call_sends_only_the_rest(folder, fake_hub, token):
    fake_hub.drop_after = 1
    with pytest.raises(UserError, match=r"connection to the Hub broke.*run the same command again") as failure:
        _push(folder, token)
    assert "\n" not in str(failure.value) and token not in str(failure.value)
    sent = set(fake_hub.objects)
    assert len(sent) == 1 and not fake_hub.asked("/commit/")
    assert set(fake_hub.branches["org/moh"]["main"]) == {".gitattributes"}

    fake_hub.drop_after = None
    fake_hub.requests.clear()
    _push(folder, token)
    resent = [request.rpartition("/")[2] for request in fake_hub.asked("^PUT ")]
    assert not sent & set(resent) and len(resent) == len([*folder.glob("*.safetensors")]) - 1
    held = fake_hub.branches["org/moh"]["main"]
    assert {name: held[name] for name in held if name != ".gitattributes"} == _content(folder)


def test_weights_and_code_of_an_earlier_upload_are_deleted_and_other_files_stay(folder, fake_hub, token):
    _push(folder, token)
    held = fake_hub.branches["org/moh"]["main"]
    held |= {"model.safetensors": b"old", "old_code.py": b"old", "picture.png": b"a picture", "config.json": b"old"}
    _push(folder, token)
    assert set(held) == {*_content(folder), ".gitattributes", "picture.png"}
    assert held["config.json"] == _content(folder)["config.json"]


def test_a_branch_is_made_and_main_stays_as_it_is(folder, fake_hub, token):
    for _ in range(2):
        url, _lines = _push(folder, token, revision="step-100")
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
