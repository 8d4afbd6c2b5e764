"""Values in templates show as plain text, whatever they hold."""

from moh_llm.evaluation.rendering import Safe, Table, code, facts, markdown_templates, plain


def test_markdown_shows_values_as_they_are() -> None:
    templates = markdown_templates("moh_llm.evaluation")
    scores = Table(["name", "score", "empty"], [["a|b", "-1.0", "-"], ["all", "2.0", "-"]], style="total")
    page = "{{ line }}\n{{ link }}\n{{ scores | table }}\n{{ place | code }}"
    values = {"line": "- *a* <b> snake_case", "link": Safe("[a](b)"), "place": "/tmp/a`b"}
    assert templates.from_string(page).render(**values, scores=scores.without_empty_columns()) == (
        "\\- \\*a\\* &lt;b&gt; snake_case\n[a](b)\n"
        "| name | score |\n| --- | ---: |\n| a\\|b | -1.0 |\n| **all** | 2.0 |\n`/tmp/a'b`"
    )


def test_published_pages_name_no_place_on_this_machine() -> None:
    assert plain("see (/tmp/x/y), file:///Users/me/z and C:\\Users\\me") == "see (y), z and me"
    assert plain("https://a.b/c/d hf://e/f and/or 1 / 2 a/b") == "https://a.b/c/d hf://e/f and/or 1 / 2 a/b"
    assert plain("a\u202eb\x00c\n d") == "abc d"
    page = markdown_templates("moh_llm.evaluation", plain).from_string("{{ pairs | table }} {{ place | code }}")
    shown = page.render(pairs=facts([("folder", "/tmp/one")]), place="/tmp/two")
    assert "| folder | one |" in shown and shown.endswith("`two`")
    assert code("a`b|c") == r"`a'b\|c`" and code("") == "`-`"
