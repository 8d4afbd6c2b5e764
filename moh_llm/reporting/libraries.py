"""What reports need beyond the package's own requirements."""

from importlib.util import find_spec

from moh_llm.errors import UserError


def require_report_libraries() -> None:
    """Raise UserError where matplotlib or jinja2 is absent, and say how to install it; neither is imported."""
    if any(find_spec(name) is None for name in ("jinja2", "matplotlib")):
        raise UserError('the report needs matplotlib and jinja2: pip install "moh-llm[report]"')
