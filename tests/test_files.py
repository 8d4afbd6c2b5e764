"""What belongs to a folder, by links; and what a folder that is made replaces."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moh_llm.errors import UserError
from moh_llm.files import check_links, check_output_folder, new_folder, scratch_folder, write_json, write_text


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


def test_a_link_into_a_hub_cache_is_followed(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--me--mine"
    for path in ("blobs/0a1b", "elsewhere/0a1b"):
        (cached / path).parent.mkdir(parents=True)
        (cached / path).write_text("{}")
    snapshot = cached / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0a1b")
    check_links(snapshot, [snapshot / "config.json"])
    (snapshot / "LICENSE").symlink_to("../../elsewhere/0a1b")
    with pytest.raises(UserError, match="outside its folder"):
        check_links(snapshot, [snapshot / "LICENSE"])


@pytest.mark.parametrize("name", ["secret.txt", "../secret.txt", "model-2"])
def test_a_link_that_leads_out_is_refused(folder: Path, name: str) -> None:
    if name == "model-2":  # begins as the folder's own name
        (folder.parent / name).write_text("")
    (folder / "LICENSE.txt").symlink_to((folder.parent / name).resolve() if name[0] != "." else name)
    with pytest.raises(UserError, match="outside its folder"):
        check_links(folder, [folder / "real.txt", folder / "LICENSE.txt"])


def test_a_failed_job_keeps_the_old_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with new_folder(output) as folder:
        write_json(folder / "a.json", 1)
    with pytest.raises(RuntimeError), new_folder(output, overwrite=True) as folder:
        write_json(folder / "b.json", 2)
        raise RuntimeError
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a.json"]


def test_what_came_into_the_place_of_a_new_folder_meanwhile_stays(tmp_path: Path) -> None:
    output = tmp_path / "out" / "model"
    with pytest.raises(UserError, match="exists and is not empty"), new_folder(output) as folder:
        (folder / "new.txt").write_text("new")
        output.mkdir()
        (output / "mine.txt").write_text("mine")
    assert [path.name for path in output.parent.rglob("*")] == ["model", "mine.txt"]
    with pytest.raises(UserError, match="is a file"), new_folder(tmp_path / "file", overwrite=True):
        (tmp_path / "file").write_text("mine")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_is_replaced_and_the_folder_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk" / "made").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/made")
    for number in range(2):
        with new_folder(tmp_path / "out", overwrite=True) as folder:
            assert folder.parent == tmp_path / "disk"  # renaming is possible on one disk alone
            (folder / f"{number}.txt").write_text("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"] and (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").rglob("*")] == ["made", "1.txt"]


@pytest.mark.parametrize("target", ["nothing", "file", "out"])  # the last is a circle
def test_a_link_to_no_folder_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "out").symlink_to(target)
    with pytest.raises(UserError, match=r"does not exist|is a file"):
        check_output_folder(tmp_path / "out", overwrite=True)


def test_no_input_and_no_working_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for output in (".", "..", str(tmp_path)):
        with pytest.raises(UserError, match="would replace the working folder"):
            check_output_folder(Path(output), overwrite=True)
    with pytest.raises(UserError, match="would replace base, which is an input"):
        check_output_folder(Path("base"), overwrite=True, reads=["base", "org/name"])
    check_output_folder(Path("below"), overwrite=False, reads=["base"])


def test_nothing_is_written_into_the_folder_of_a_model(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match="the folder of a model"):
        check_output_folder(tmp_path / "sub" / "out", overwrite=False)


def test_what_a_process_left_is_removed_before_its_parent_has_noticed_its_end(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the list of processes
    with scratch_folder(tmp_path / "out") as own:
        left = own.with_name(own.name.replace(f".{os.getpid()}.", f".{child.pid}."))
    left.mkdir()
    with scratch_folder(tmp_path / "out"):
        assert not left.exists()
    child.wait()


def test_a_read_only_file_system_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match=r"^cannot write .*report\.md: Read-only file system$"):
        write_text(tmp_path / "report.md", "text")
