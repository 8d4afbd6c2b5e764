"""A made corpus of several sources and formats, and the tokenizer to go with it."""

import gzip
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moh_llm.data.tokenizer import TextTokenizer

MIXTURE = """
name: made
validation_share: 0.1
sources:
  plain: {weight: 5, files: plain-*.jsonl}
  packed: {weight: 3, files: packed.json.gz}
  named: {weight: 2, files: named.jsonl, text_field: body}
"""


def letters(seed: int, count: int) -> list[str]:
    """Documents of 20 to 400 letters."""
    draw = random.Random(seed)
    return [
        f"{seed}/{i}: " + "".join(draw.choices("abcdefgh \n", k=draw.randrange(20, 400))) + "." for i in range(count)
    ]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return TextTokenizer.load(str(folder))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The mixture file; its sources lie beside it."""
    folder = tmp_path / "text with spaces, é and 文"
    folder.mkdir()
    for number in range(2):
        lines = (json.dumps({"text": text}) for text in letters(number, 150))
        (folder / f"plain-{number}.jsonl").write_text("\n".join(lines) + "\n")
    with gzip.open(folder / "packed.json.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in letters(7, 200))
    (folder / "named.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in letters(8, 200)))
    path = folder / "mixture.yaml"
    path.write_text(MIXTURE)
    return path


@pytest.fixture(scope="session")
def shards() -> Callable[[Path], dict[str, str]]:
    """Hash of every shard, index and metadata file of a folder."""

    def hashes(folder: Path) -> dict[str, str]:
        files = [path for path in folder.rglob("*") if path.is_file() and ".ds" in path.name]
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}

    return hashes
