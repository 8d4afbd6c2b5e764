"""The lineage of a model: what was done to its weights, from the conversion on, in a file that travels with them.

`lineage.json` lies in the model's folder. A conversion begins it, and each training run takes the one of the model
that it begins with and adds an entry. Entries identify weights by hashes, so that a change without an entry is found.
No path of a machine is in it.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from moh_llm.records.base import Record
from moh_llm.records.conversion import last_component
from moh_llm.records.seal import WeightHashes

NAME = "lineage.json"
# What figures of a run are against: the checkpoint that the conversion names or, where that is not available, the
# model that the run began with.
ReferenceKind = Literal["base", "start"]
REFERENCES: dict[ReferenceKind, str] = {"base": "the base", "start": "the model it began with, all heads on"}


def in_words(kinds: Iterable[ReferenceKind]) -> tuple[str, str]:
    """Name of the reference of some runs, such as "the base", and its possessive, "the base's".

    Where runs have different references, the name is "the reference".
    """
    different = list(dict.fromkeys(kinds))
    name = REFERENCES[different[0]] if len(different) == 1 else "the reference"
    return name, f"that of {name}" if different == ["start"] else f"{name}'s"


class ConversionEntry(Record):
    """A conversion of ``base`` (its name without a path), which has the hash ``dense_sha256``, into ``made``.

    ``new_tokens`` is how many tokens were added to the base's.
    """

    kind: Literal["conversion"]
    base: str
    revision: str | None
    fingerprint: str
    dense_sha256: str
    made: WeightHashes
    new_tokens: int = 0


class RunEntry(Record):
    """A training run.

    Attributes:
        objective: "distillation" or "cross_entropy".
        tokens, steps: how long it trained.
        mixture: the text, by its mixture's name.
        seed: the recipe's.
        teacher: what taught it; None for cross-entropy.
        lora_rank: of its adapters; None where it had none.
        freeze_base: whether routers and fallbacks alone were trained.
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
    freeze_base: bool = False
    began_with: WeightHashes
    made: WeightHashes


Entry = Annotated[ConversionEntry | RunEntry, Field(discriminator="kind")]


class Chain(Record):
    """The recorded history of a model, oldest first; empty without a record."""

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
            if isinstance(entry, RunEntry):
                same = entry.began_with.difference(made) is None
            else:
                same = entry.dense_sha256 == made.dense
            if not same:
                found.append(number)
        return found


def mixture_name(name: str | None, mixture: str) -> str:
    """A mixture by the ``name`` that it has itself; where that is not on record as its file or folder is called."""
    return last_component(name) if name else re.sub(r"\.ya?ml$", "", last_component(mixture))


def read_chain(folder: Path) -> Chain:
    """The lineage in a model's folder, empty where there is none. Raises UserError for a malformed one."""
    path = folder / NAME
    return Chain.read(path) if path.is_file() else Chain(entries=[])
