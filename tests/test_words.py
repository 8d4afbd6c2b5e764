"""Pages are in plain words and short sentences."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READ = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/README.md"]
PAGES = sorted(str(path.relative_to(ROOT)) for pattern in READ for path in ROOT.glob(pattern))
MOST_WORDS = 30  # of a sentence
# Words that crept into these pages, and what a reader of transformers' or PyTorch's documentation expects.
PLAIN = {
    r"rivals?": "other methods",
    r"but for": "except",
    r"in the mean": "on average",
    r"ways? back": "converting back",
    r"(takes?|took) off": "removes",
    r"out of sight": "outside the window",
    r"carr(y|ies|ied) out": "runs",
    r"(gives?|gave) back": "recovers",
    r"near(er|est)": "closer",
    r"beside": "next to",
    r"anew": "again",
    r"travels?": "is saved with",
    r"in (a|one) line": "with a short message",
    r"receipts?": "record of what was read",
    r"promises?d?": "guarantee",
    r"lies?|lay": "is",
    r"go(es)? on": "continues",
    r"(is|are) gone": "was removed",
    r"rests? on": "comes from",
}


def prose(page: str) -> str:
    """The page without code, comments, pictures, markup and addresses."""
    text = (ROOT / page).read_text()
    for pattern, instead in (
        (r"```.*?```|<!--.*?-->|!\[[^\]]*\]\([^)]*\)", "\n\n"),
        (r"`[^`]*`", "code"),
        (r"\[([^\]]*)\]\([^)]*\)", r"\1"),
        (r"</?\w[^>]*>", "\n\n"),
    ):
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    return text


def sentences(text: str) -> list[str]:
    """Sentences of paragraphs, items, headings and cells of tables."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.)\s)|\n(?=\|)|\|", text)
    return [" ".join(one.split()) for block in blocks for one in re.split(r"(?<=[.?!])\s+", block.strip())]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short_and_words_plain(page):
    text = prose(page)
    assert [one for one in sentences(text) if len(re.findall(r"\S*\w\S*", one)) > MOST_WORDS] == []
    found = {(word[0], plain) for old, plain in PLAIN.items() for word in re.finditer(rf"\b({old})\b", text, re.I)}
    assert not found, f"{page}: write instead: {found}"


def test_what_a_sentence_is():
    text = "# A heading\n\nOne [link] of\nthree lines. Two!\n- an item\n\n| a cell | b |\n"
    wanted = ["# A heading", "One [link] of three lines.", "Two!", "- an item", "a cell", "b"]
    assert [one for one in sentences(text) if one] == wanted
    assert len(PLAIN) <= 20
