"""What reports need beyond the package's own requirements."""

from moh_llm.errors import UserError


def require_report_libraries() -> None:
    """Raise UserError with the install command where matplotlib or jinja2 is absent."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "matplotlib"):
            raise
        raise UserError('the report needs matplotlib and jinja2: pip install "moh-llm[report]"') from error
