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

    evaluation: Folder | None = None
    """Folder of `moh-llm evaluate`, for the card."""

    licence: str | None = None
    """The Hub's id of the licence. Default: the base's."""

    dry_run: bool = False
    """Do everything except the upload. The Hub is not contacted."""
