"""A document's blocks in Markdown and HTML: the same words, and no value that becomes markup."""

import html
import re

from moh_llm.evaluation.document import (
    Bullets,
    Caution,
    Chart,
    Charts,
    Code,
    Commands,
    Details,
    Document,
    Heading,
    Paragraph,
    Section,
    Table,
    facts,
)
from moh_llm.evaluation.markdown import plain, render_blocks, render_markdown
from moh_llm.evaluation.page import render_html

BLOCKS = [
    Table(["name", "score", "empty"], [["a|b", "-1.0", "-"], ["all", "2.0", "-"]], total=True).without_empty_columns(),
    facts([("folder", Code("/tmp/a`b")), ("router", (Code("linear"), ": a map"))]),
    Paragraph("*best*", strong=True),
    Heading("More"),
    Charts([Chart("c", "Loss", "", "<svg></svg>", ["x"], [[1]])]),
    Details("* Inferred", [Bullets(["- of A", "<b>"])]),
    Commands("moh-llm report a"),
]
MARKDOWN = r"""# T \# 1

> **Mind \_this\_**

## One

| name | score |
| --- | ---: |
| a\|b | -1.0 |
| **all** | 2.0 |

|  |  |
| --- | --- |
| folder | `/tmp/a'b` |
| router | `linear`: a map |

**\*best\***

### More

Charts in `report.html`: Loss.

\* Inferred:

- \- of A
- &lt;b&gt;

```
moh-llm report a
```
"""


def test_every_block_in_markdown() -> None:
    document = Document("T # 1", [Caution("Mind _this_")], [Section("one", "One", BLOCKS)])
    assert render_markdown(document) == MARKDOWN
    # What leaves this machine names no place on it.
    assert "| folder | `a'b` |" in render_blocks(BLOCKS[1:2], plain)


def test_every_block_in_html() -> None:
    tokens = Table(["token", "0", "1"], [["<t>", "on", "off"]], kind="tokens")
    document = Document("T <1>", [Caution("Mind <this>")], [Section("one", "One", [*BLOCKS, tokens])])
    page = render_html(document, {"a": 1})
    for part in (
        "<title>T &lt;1&gt;</title>",
        '<p class="warning">Mind &lt;this&gt;</p>',
        '<a href="#one">One</a>',
        '<tr class="total"><td>all</td><td class="number">2.0</td></tr>',
        "<td>folder</td><td><code>/tmp/a`b</code></td>",
        '<p class="verdict">*best*</p>',
        "<svg></svg>",
        "<details><summary>* Inferred</summary>\n<ul><li>- of A</li><li>&lt;b&gt;</li></ul>",
        '<td>&lt;t&gt;</td><td><span class="on" title="head 0: on"></span></td>',
        "<pre>moh-llm report a</pre>",
    ):
        assert part in page, part
    assert "empty" not in html.unescape(re.sub(r"<style>.*</style>", "", page, flags=re.DOTALL))
