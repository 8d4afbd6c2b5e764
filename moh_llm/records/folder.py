"""The records that travel in a model's folder, and whether they are of the model that lies there.

A folder may have changed since its records were written: a file is damaged or was edited, its weights were saved by
another program, or a record comes from another folder. No figure of such records is one of the model.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from moh_llm.records.conversion import NAME as CONVERSION
from moh_llm.records.conversion import Conversion, read_conversion
from moh_llm.records.identity import hash_model
from moh_llm.records.lineage import NAME as LINEAGE
from moh_llm.records.lineage import Chain, ConversionEntry, read_chain
from moh_llm.records.seal import EDITABLE, WeightHashes, describe_changes, find_changes, read_seal

_UNSEALED = "it has no seal.json, so whether its files are as they were written was not checked"


@dataclass(frozen=True)
class FolderRecords:
    """The records of a model's folder that are of the model in it.

    Attributes:
        model: hashes of that model.
        conversion: its conversion; without figures where `changed`, and None where it cannot be trusted to name a base.
        chain: its lineage.
        changed: why the records are not of this model; None where they are.
        note: what else its reader should know: there is no seal, or files were edited that may be.
    """

    model: WeightHashes
    conversion: Conversion | None
    chain: Chain
    changed: str | None = None
    note: str | None = None

    def without_figures(self, changed: str) -> "FolderRecords":
        """The same with no more of the conversion than the base that it names; ``changed`` says why."""
        kept = self.conversion and Conversion(
            base=self.conversion.base, vocabulary=self.conversion.vocabulary, set_aside=changed
        )
        return replace(self, conversion=kept, changed=changed)

    def lines(self, name: str) -> list[str]:
        """What to tell the user of it, a line each; ``name`` is what the model is called."""
        found = []
        if self.changed:
            found.append(f"warning: {name}: {self.changed}; of its records only the base's name is used")
        return [*found, f"{name}: {self.note}"] if self.note else found


def read_records(folder: Path, licences: bool = False) -> FolderRecords:
    """Read a model's folder, all of its weights, and its records.

    Args:
        folder: the model's.
        licences: whether an edited licence is a change, too.

    Raises:
        UserError: weights or config cannot be read, or a record that nobody changed is malformed.
    """
    seal = read_seal(folder)
    changes = find_changes(folder, seal, licences) if seal else {}
    faults = [name for name in changes if name not in EDITABLE]
    edited = [name for name in changes if name in EDITABLE]
    conversion = None if CONVERSION in faults else read_conversion(folder)
    chain = Chain(entries=[]) if LINEAGE in faults else read_chain(folder)
    model = hash_model(folder)
    mismatch = _find_mismatch(model, conversion, chain)
    changed = ", and ".join(filter(None, [describe_changes(changes, faults) if faults else None, mismatch])) or None
    note = f"edited since it was made: {', '.join(edited)}" if edited else None
    if seal is None and model.plan is not None:
        note = _UNSEALED
    records = FolderRecords(model, conversion, chain, changed, note)
    return records.without_figures(changed) if changed else records


def _find_mismatch(model: WeightHashes, conversion: Conversion | None, chain: Chain) -> str | None:
    """Why conversion and lineage are not of the model with these hashes; None where they are, or there are none."""
    last = chain.entries[-1].made if chain.entries else conversion and conversion.made
    if last and model.plan is None:  # the dense model inside, which goes by the lineage of the MoH one
        last = WeightHashes(dense=last.dense, routing=model.routing)
    if last and (part := last.difference(model)):
        return f"it has {part} other than {LINEAGE if chain.entries else CONVERSION} says"
    conversions = [entry for entry in chain.entries if isinstance(entry, ConversionEntry)]
    if conversion and conversion.made and conversions and (part := conversions[-1].made.difference(conversion.made)):
        return f"{CONVERSION} is of a model with {part} other than that of {LINEAGE}"
    return None
