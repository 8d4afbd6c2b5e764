"""Uploading, with a Hub in memory."""

import pytest

from moh_llm.errors import UserError
from moh_llm.hub.publish import check_repo_id, find_token, push


@pytest.fixture
def token(fake_hub) -> str:
    return find_token()


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_would_be_read_of_an_earlier_upload_is_deleted_and_other_files_stay(folder, fake_hub, token):
    assert push(folder, "org/moh", token) == (f"{fake_hub.url}/org/moh", "1" * 40)
    held = fake_hub.branches["org/moh"]["main"]
    held |= {"model.safetensors": b"old", "old_code.py": b"old", "picture.png": b"a picture", "config.json": b"old"}
    read = "adapter_config.json", "chat_template.jinja", "run.json", "evaluation.json", "tekken.json"
    held |= dict.fromkeys((*read, "additional_chat_templates/rag.jinja"), b"old")
    assert not {*read} & {*_content(folder)}
    push(folder, "org/moh", token)
    assert {name: held[name] for name in _content(folder)} == _content(folder)
    assert set(held) == {*_content(folder), ".gitattributes", "picture.png"}
    assert fake_hub.requests.count("create_commit") == 2  # one for each upload


def test_a_branch_is_made_and_main_stays_as_it_is(folder, fake_hub, token):
    url, _ = push(folder, "org/moh", token, revision="step-100")
    assert url.endswith("/org/moh/tree/step-100")
    branches = fake_hub.branches["org/moh"]
    assert set(branches["main"]) == {".gitattributes"}
    assert set(branches["step-100"]) == {*_content(folder), ".gitattributes"}


def test_private_is_private_or_refused(folder, fake_hub, token):
    push(folder, "org/moh", token, private=True)
    assert fake_hub.private["org/moh"]
    fake_hub.private["org/moh"] = False
    with pytest.raises(UserError, match="org/moh is public already"):
        push(folder, "org/moh", token, private=True)


@pytest.mark.parametrize(
    ("status", "says"), [(401, "hf auth login"), (403, "may not write to org/moh"), (500, "run the same command again")]
)
def test_refusals_say_what_to_do_and_hide_the_token(folder, fake_hub, token, status, says):
    fake_hub.refuse = status
    with pytest.raises(UserError) as failure:
        push(folder, "org/moh", token)
    message = str(failure.value)
    assert says in message and "[hidden]" in message and "\n" not in message and token not in message


@pytest.mark.parametrize("name", ["moh", "org/mo h"])
def test_names_that_cannot_be_a_repository(name):
    with pytest.raises(UserError, match="cannot be a repository"):
        check_repo_id(name)
