"""The options of a publication."""

from moh_llm.options import Folder, options


@options()
class PublishConfig:
    """One publication: a model's folder, and the repository that gets it."""

    folder: Folder
    """Model that `moh-llm convert` or `moh-llm train` made."""

    repo_id: str
    """Repository on the Hub, `ORG/NAME`. It is made if absent."""

    private: bool = False
    """Make the repository private. One that is public already is refused."""

    revision: str | None = None
    """Branch to upload to. It is made if absent. Default: `main`."""

    run: Folder | None = None
    """Training run, for the card. Default: the one beside the model."""

    evaluation: Folder | None = None
    """Folder of `moh-llm evaluate`, for the card."""

    licence: str | None = None
    """The Hub's id of the licence. Default: the base's."""

    dry_run: bool = False
    """Do everything except the upload. The Hub is not contacted."""

    force: bool = False
    """Publish although a check or the proof fails. The card says so. Files with secrets are refused all the same, and
    files that are not part of a model are left out."""

    allow_other_code: bool = False
    """Run and publish Python files that are not this version's. Read them first. The card says so."""

    drop_records: bool = False
    """Publish a model that is not what its records describe. Without the figures of these records; the card says so."""
