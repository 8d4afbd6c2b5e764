"""Check of the packages that reports need beyond the package's own requirements."""

from importlib.util import find_spec

from moh_llm.errors import UserError


def require_matplotlib() -> None:
    """Raise UserError with the install command where matplotlib is absent; does not import it, which takes time."""
    if find_spec("matplotlib") is None:
        raise UserError('the report needs matplotlib: pip install "moh-llm[report]"')
