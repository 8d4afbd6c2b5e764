"""The release workflow and the Dockerfile name what is there."""

import configparser
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
DOCKERFILE = ROOT / "Dockerfile"


def test_all_install_the_pytorch_that_was_tested() -> None:
    (tested,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for path in (RELEASE, DOCKERFILE, ROOT / "Makefile"):
        assert set(re.findall(r"torch==([\d.]+)", path.read_text())) == {tested}, path.name


def test_extras_and_copied_files_exist() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    for path in (RELEASE, DOCKERFILE):
        for extras in re.findall(r'\[([\w,]+)\]"', path.read_text()):
            assert set(extras.split(",")) <= set(settings["options.extras_require"]), extras
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE.read_text(), re.M) for name in line.split()]
    assert len(copied) > 8 and all((ROOT / name).exists() for name in copied)
    sent = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(sent) == set(copied)


def test_only_a_tag_publishes_and_only_the_last_job_may() -> None:
    workflow = yaml.safe_load(RELEASE.read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert "permissions" not in build and "secrets." not in RELEASE.read_text()
