"""A document as one HTML file: no script, no request, colours of the reader's light or dark theme."""

import json
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from moh_llm.evaluation.document import Block, Code, Document, Inline


def render_html(document: Document, record: dict[str, Any]) -> str:
    """The page of a document, with ``record``, what `report.json` holds, to download."""
    loader = PackageLoader("moh_llm.evaluation")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"inline": _inline, "kind": _kind, "svg": Markup}
    link = "data:application/json;charset=utf-8," + quote(json.dumps(record, separators=(",", ":")))
    return templates.get_template("report.html").render(document=document, json_link=link)


def _inline(value: Inline) -> Markup:
    parts = value if isinstance(value, tuple) else (value,)
    return Markup().join(
        Markup("<code>{}</code>").format(str(part)) if isinstance(part, Code) else escape(part) for part in parts
    )


def _kind(block: Block) -> str:
    return type(block).__name__
