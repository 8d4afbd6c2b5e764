"""Uploading, against a local server in place of the Hub."""

from types import SimpleNamespace

import pytest

from moh_llm.errors import UserError
from moh_llm.hub.upload import check_repo_id, describe, find_token, push


@pytest.fixture
def token(fake_hub) -> str:
    return find_token()


def _push(folder, token, **options):
    lines = []
    url, _commit = push(folder, describe(folder), "org/moh", token, say=lines.append, **options)
    return url, lines


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_weights_are_there_before_the_one_commit_and_the_list_is_compared_after_it(folder, fake_hub, token):
    url, lines = _push(folder, token)
    held = fake_hub.branches["org/moh"]["main"]
    assert {name: held[name] for name in held if name != ".gitattributes"} == _content(folder)
    assert url == f"{fake_hub.url}/org/moh"
    order = [request.split()[0] + " " + request.split("/")[-2] for request in fake_hub.requests]
    shards = len([*folder.glob("*.safetensors")])
    assert order.count("PUT storage") == shards and order.count("POST commit") == 1
    last_weight = max(i for i, request in enumerate(order) if request == "PUT storage")
    assert order.index("POST api") < last_weight < order.index("POST commit") < len(order) - 1
    assert order[-1] == "GET tree"
    assert any(f"{len(_content(folder))} files" in line for line in lines)


def test_a_broken_connection_is_told_and_the_same_command_sends_only_the_rest(folder, fake_hub, token):
    fake_hub.drop_after = 1
    with pytest.raises(UserError, match=r"connection to the Hub broke.*the same command goes on") as failure:
        _push(folder, token)
    assert "\n" not in str(failure.value) and token not in str(failure.value)
    sent = set(fake_hub.objects)
    assert len(sent) == 1 and not fake_hub.asked("/commit/")
    assert not [name for name in fake_hub.branches["org/moh"]["main"] if name.endswith(".json")]

    fake_hub.drop_after = None
    fake_hub.requests.clear()
    _push(folder, token)
    resent = [request.rpartition("/")[2] for request in fake_hub.asked("^PUT ")]
    assert not sent & set(resent) and len(resent) == len([*folder.glob("*.safetensors")]) - 1
    held = fake_hub.branches["org/moh"]["main"]
    assert {name: held[name] for name in held if name != ".gitattributes"} == _content(folder)


def test_weights_of_an_earlier_upload_go_and_other_files_stay(folder, fake_hub, token):
    _push(folder, token)
    held = fake_hub.branches["org/moh"]["main"]
    held |= {"model.safetensors": b"old", "old_code.py": b"old", "picture.png": b"a picture"}
    _push(folder, token)
    assert set(held) == {*_content(folder), ".gitattributes", "picture.png"}


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


def test_another_content_than_was_sent_is_found(folder, fake_hub, token, monkeypatch):
    _push(folder, token)
    fake_hub.branches["org/moh"]["main"]["README.md"] = b"another"
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda self, **options: SimpleNamespace(oid="1"))
    with pytest.raises(UserError, match=r"README.md in org/moh is not what was sent"):
        _push(folder, token)
    del fake_hub.branches["org/moh"]["main"]["config.json"], fake_hub.branches["org/moh"]["main"]["README.md"]
    with pytest.raises(UserError, match=r"org/moh lacks README.md|org/moh lacks config.json"):
        _push(folder, token)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "run `hf auth login`"),
        (402, "has no room for org/moh"),
        (403, "the token may not write to org/moh"),
        (400, "the Hub refuses org/moh"),
        (500, "the same command goes on"),
    ],
)
def test_refusals_name_the_way_out_and_hide_the_token(folder, fake_hub, token, status, says):
    fake_hub.refuse = status
    with pytest.raises(UserError) as failure:
        _push(folder, token)
    message = str(failure.value)
    assert says in message and "\n" not in message and token not in message


def test_no_server_is_a_broken_connection(folder, token, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="connection to the Hub broke"):
        _push(folder, token)


@pytest.mark.parametrize("name", ["moh", "org/moh/x", "org/mo h", "org/-moh", ""])
def test_names_that_cannot_be_a_repository(name):
    with pytest.raises(UserError, match="cannot be a repository"):
        check_repo_id(name)
