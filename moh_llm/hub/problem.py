"""What keeps a folder from being published."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One reason why a file must not be published as it is.

    Attributes:
        file: name relative to the model's folder.
        what: what is wrong; never holds a secret that was found.
        fix: the way out.
        forceable: whether ``--force`` may pass over it. A secret never leaves.
    """

    file: str
    what: str
    fix: str
    forceable: bool = True

    def __str__(self) -> str:
        return f"{self.file}: {self.what}; {self.fix}"
