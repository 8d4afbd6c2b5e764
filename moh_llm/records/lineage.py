"""The lineage of a model: what was done to its weights, from the conversion on, in a file that travels with them.

`lineage.json` lies in the model's folder. A conversion begins it, and each training run takes the one of the model
that it begins with and adds an entry. Entries name weights by hashes, so that a change that no entry tells of shows.
No path of a machine is in it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moh_llm.model_folder import read_weight_map
from moh_llm.modeling import is_routing_weight
from moh_llm.records.base import Record
from moh_llm.records.conversion import last_component

NAME = "lineage.json"
# What figures of a run are against: the checkpoint that the conversion names or, where that cannot be had, the
# model that the run began with.
ReferenceKind = Literal["base", "start"]
REFERENCES: dict[ReferenceKind, str] = {"base": "the base", "start": "the model it began with, all heads on"}
_CHUNK = 1 << 22


def in_words(kinds: Iterable[ReferenceKind]) -> tuple[str, str]:
    """What figures of some runs are against, such as "the base", and what is its own, "the base's".

    Where runs differ, it is "the reference", of which each run has to say which it is.
    """
    different = list(dict.fromkeys(kinds))
    name = REFERENCES[different[0]] if len(different) == 1 else "the reference"
    return name, f"that of {name}" if different == ["start"] else f"{name}'s"


class WeightHashes(Record):
    """SHA-256 over name, dtype, shape and bytes of each tensor, in the order of their names.

    They do not depend on how tensors are laid out in files.

    Attributes:
        dense: of the tensors that the dense model has, too.
        routing: of those of routers and fallbacks.
    """

    dense: str
    routing: str


class ConversionEntry(Record):
    """A conversion of ``base`` (its name without a path), which has the hash ``dense_sha256``, into ``made``."""

    kind: Literal["conversion"]
    base: str
    revision: str | None
    fingerprint: str
    dense_sha256: str
    made: WeightHashes


class RunEntry(Record):
    """A training run.

    Attributes:
        objective: "distillation" or "cross_entropy".
        tokens, steps: how long it trained.
        mixture: the text, by its mixture's name.
        seed: the recipe's.
        teacher: what taught it; None for cross-entropy.
        lora_rank: of its adapters; None where all weights were trained.
        began_with, made: the weights before and after.
    """

    kind: Literal["run"]
    objective: str
    tokens: int
    steps: int
    mixture: str
    seed: int
    teacher: ReferenceKind | None
    lora_rank: int | None
    began_with: WeightHashes
    made: WeightHashes


Entry = Annotated[ConversionEntry | RunEntry, Field(discriminator="kind")]


class Chain(Record):
    """What is on record of a model, oldest first; empty where nothing is."""

    entries: list[Entry]

    @property
    def runs(self) -> list[RunEntry]:
        """The training runs."""
        return [entry for entry in self.entries if isinstance(entry, RunEntry)]

    @property
    def tokens(self) -> int:
        """Training tokens of all runs."""
        return sum(run.tokens for run in self.runs)

    def with_entry(self, entry: ConversionEntry | RunEntry) -> "Chain":
        """The chain with one more entry."""
        return Chain(entries=[*self.entries, entry])

    def unrecorded(self) -> list[int]:
        """Positions of the entries that began with other weights than the entry before them made."""
        found = []
        for number in range(1, len(self.entries)):
            made, entry = self.entries[number - 1].made, self.entries[number]
            same = entry.began_with == made if isinstance(entry, RunEntry) else entry.dense_sha256 == made.dense
            if not same:
                found.append(number)
        return found


def mixture_name(mixture: str) -> str:
    """A mixture as its file or folder is called."""
    return re.sub(r"\.ya?ml$", "", last_component(mixture))


def read_chain(folder: Path) -> Chain:
    """The lineage in a model's folder, empty where there is none. Raises UserError for a malformed one."""
    path = folder / NAME
    return Chain.read(path) if path.is_file() else Chain(entries=[])


def hash_weights(folder: Path, weight_map: Mapping[str, str] | None = None) -> WeightHashes:
    """Read all weights of a model's folder, about a second per GB.

    Args:
        folder: the model's.
        weight_map: tensor's name -> file's name; None: as the folder's own index has it.

    Raises:
        UserError: a file is missing or damaged.
    """
    if weight_map is None:
        weight_map = read_weight_map(folder)[1]
    lines: dict[bool, list[str]] = {True: [], False: []}
    for shard in sorted(set(weight_map.values())):
        for name, line in _tensors(folder / shard):
            if weight_map.get(name) == shard:
                lines[is_routing_weight(name)].append(line)
    dense, routing = (hashlib.sha256("".join(sorted(lines[of])).encode()).hexdigest() for of in (False, True))
    return WeightHashes(dense=dense, routing=routing)


def _tensors(shard: Path) -> Iterator[tuple[str, str]]:
    """Name of each tensor of a safetensors file, and a line that tells it from any other."""
    with shard.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, about in header.items():
            first, last = about["data_offsets"]
            file.seek(8 + size + first)
            digest, left = hashlib.sha256(), last - first
            while left and (chunk := file.read(min(left, _CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
            yield name, f"{name} {about['dtype']} {about['shape']} {digest.hexdigest()}\n"
