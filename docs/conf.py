"""Sphinx builds the site from the repository's own pages and the docstrings: `make docs`.

The source folder is the root of the repository, so that a link means the same in a page of the site and in the
repository. A link to a page, a heading or a file that does not exist is a warning, and `make docs` fails on any.
"""

import moh_llm

project = "MoH-LLM"
release = version = moh_llm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["*.md", "docs/**.md", "examples/*.md"]
exclude_patterns = [".*", "out", "site"]  # are not searched
root_doc = "docs/contents"
html_extra_path = ["index.html"]  # leads to README.html
html_theme = "furo"
html_title = f"MoH-LLM {release}"

myst_heading_anchors = 4  # by the names that the repository's browser gives them

# Docstrings have code in single backticks, too.
default_role = "code"
smartquotes = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
maximum_signature_line_length = 100
suppress_warnings = ["misc.highlighting_failure"]  # the diagram of ARCHITECTURE.md is shown as text
