"""What belongs to a folder, by links; and what a folder that is made replaces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moh_llm.errors import UserError
from moh_llm.files import check_links, check_place, new_folder, outside, scratch_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, beside one that is not its."""
    (tmp_path / "model" / "inner").mkdir(parents=True)
    (tmp_path / "model" / "real.txt").write_text("its own")
    (tmp_path / "secret.txt").write_text("of the machine")
    return tmp_path / "model"


def test_files_and_links_inside_a_folder_are_its_own(folder: Path) -> None:
    (folder / "inner" / "link.txt").symlink_to("../real.txt")
    (folder / "absolute.txt").symlink_to(folder / "real.txt")
    (folder.parent / "alias").symlink_to(folder)
    for root in (folder, folder.parent / "alias"):
        check_links(root, [path for path in root.rglob("*") if path.is_file()])
        assert outside(root / "not there.txt", root) is None


def test_a_link_into_a_hub_cache_is_followed(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--me--mine"
    for path in ("blobs/0a1b", "elsewhere/0a1b"):
        (cached / path).parent.mkdir(parents=True)
        (cached / path).write_text("{}")
    snapshot = cached / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0a1b")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "config.json").symlink_to(snapshot / "config.json")  # of a link
    check_links(snapshot, [snapshot / "config.json"])
    check_links(tmp_path / "copy", [tmp_path / "copy" / "config.json"])
    (snapshot / "LICENSE").symlink_to("../../elsewhere/0a1b")
    assert outside(snapshot / "LICENSE", snapshot) == (cached / "elsewhere" / "0a1b").resolve()


@pytest.mark.parametrize("name", ["secret.txt", "../secret.txt", "model-2"])
def test_a_link_that_leads_out_is_refused(folder: Path, name: str) -> None:
    if name == "model-2":  # begins as the folder's own name
        (folder.parent / name).write_text("")
    (folder / "LICENSE.txt").symlink_to((folder.parent / name).resolve() if name[0] != "." else name)
    with pytest.raises(UserError, match="outside its folder") as refused:
        check_links(folder, [folder / "real.txt", folder / "LICENSE.txt"])
    assert "\n" not in str(refused.value)


def test_a_folder_of_links_and_a_circle_of_them(folder: Path) -> None:
    (folder / "templates").symlink_to(folder.parent)
    assert outside(folder / "templates" / "secret.txt", folder) == (folder.parent / "secret.txt").resolve()
    (folder / "circle").symlink_to("circle")
    assert outside(folder / "circle", folder) is None


def test_nothing_is_written_into_a_hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "link").symlink_to(tmp_path / "hub" / "models--org--name")
    for place in ("hub/moh", "hub/models--org--name/snapshots/0a1b/moh", "link/moh", "other/models--org--name/moh"):
        with pytest.raises(UserError, match="a cache of the Hub; name another folder"):
            check_place(tmp_path / place)
    check_place(tmp_path / "moh")
    check_place(tmp_path / "run" / "model")


def test_what_came_into_the_place_of_a_new_folder_meanwhile_stays(tmp_path: Path) -> None:
    output = tmp_path / "out" / "model"
    with pytest.raises(UserError, match="exists and is not empty"), new_folder(output) as folder:
        (folder / "new.txt").write_text("new")
        output.mkdir()
        (output / "mine.txt").write_text("mine")
    assert [path.name for path in output.parent.rglob("*")] == ["model", "mine.txt"]
    with new_folder(output, overwrite=True) as folder:
        (folder / "new.txt").write_text("new")
    assert [path.name for path in output.parent.rglob("*")] == ["model", "new.txt"]


def test_a_file_that_came_into_the_place_of_a_new_folder_stays(tmp_path: Path) -> None:
    output = tmp_path / "model"
    with pytest.raises(UserError, match="is a file"), new_folder(output, overwrite=True):
        output.write_text("mine")
    assert output.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()
    with new_folder(output) as folder:
        (folder / "new.txt").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "new.txt"]


def test_what_a_process_left_is_removed_before_its_parent_has_noticed_its_end(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the list of processes
    with scratch_folder(tmp_path / "out") as own:
        left = own.with_name(own.name.replace(f".{os.getpid()}.", f".{child.pid}."))
    left.mkdir()
    with scratch_folder(tmp_path / "out"):
        assert not left.exists()
    child.wait()
