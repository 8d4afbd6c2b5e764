"""YAML with the types of version 1.2, as plain values."""

import math

import pytest

from moh_llm.errors import UserError
from moh_llm.reading import parse_yaml

CORE = [  # text, value by the core schema
    *((word, word) for word in ("no", "off", "yes", "=", "<<", "1:30", "1_000", "2024-01-01", "1e", "tRue")),
    *(("~", None), ("null", None), ("", None), ("true", True), ("FALSE", False)),
    *(
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("0x1F", 31),
        ("0o10", 8),
        ("1e3", 1e3),
        ("1e-5", 1e-5),
        ("1.", 1.0),
        ("-.5e1", -5.0),
    ),
    *((".inf", math.inf), ("-.INF", -math.inf), ("'no'", "no"), ('"010"', "010")),
]


@pytest.mark.parametrize(("text", "value"), CORE)
def test_values_have_the_types_of_the_core_schema(text, value):
    found = parse_yaml(f"a: {text}", "f")["a"]
    assert found == value and type(found) is type(value)


def test_keys_and_words_are_texts():
    text = "{no: 1, 010: 1e3, 1e3: [0x1F, no, true], ~: null}"
    assert parse_yaml(text, "f") == {"no": 1, "010": 1e3, "1e3": [31, "no", True], "~": None}
    words = parse_yaml(text, "f", words=True)
    assert words == {"no": "1", "010": "1e3", "1e3": ["0x1F", "no", True], "~": None}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 1\nb: 2\na: 3\n", "the key 'a' is given twice"),  # the first one would be lost
        ("? [a]\n: b\n", "a key is not a plain string"),
        ("a: &m [*m]\n", "aliases are not supported"),
        ("a: !!binary eA==", "line 1"),
        ("a: !!timestamp 2024-01-01", "line 1"),
        ("a: !!python/object:os.system {}\n", "line 1"),
        ("a: !!int x", "invalid literal"),
        ("a: 010", "invalid literal"),
        ("a: " + "[" * 5000, "nested"),
        ("a: " + "9" * 5000, "cannot be read as YAML"),
    ],
)
def test_other_values_are_refused(text, fault):
    with pytest.raises(UserError, match=r"^f cannot be read as YAML: ") as caught:
        parse_yaml(text, "f")
    assert fault in str(caught.value) and len(str(caught.value)) < 500
