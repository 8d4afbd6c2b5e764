"""YAML with the types of version 1.2, as plain values."""

import math

import pytest

from moh_llm.errors import UserError
from moh_llm.reading import parse_yaml

CORE = [  # text, value by the core schema
    *((word, word) for word in ("no", "No", "off", "yes", "on", "y", "n", "NO", "=", "<<", "nil", "tRue")),
    *((word, word) for word in ("1:30", "190:20:30", "1_000", "0b11", "2024-01-01", "2024-01-01 10:00", "1e", "0o8")),
    *((word, None) for word in ("~", "null", "Null", "NULL", "")),
    *((word, True) for word in ("true", "True", "TRUE")),
    *((word, False) for word in ("false", "False", "FALSE")),
    *(("0", 0), ("010", 10), ("-7", -7), ("+7", 7), ("0o10", 8), ("0x1F", 31), ("08", 8)),
    *(("1e3", 1e3), ("1e-5", 1e-5), ("1E+5", 1e5), ("1.", 1.0), (".5", 0.5), ("-.5e1", -5.0), ("1.10", 1.1)),
    *((".inf", math.inf), ("-.INF", -math.inf), ("+.Inf", math.inf)),
    *(("'no'", "no"), ('"010"', "010")),
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


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "b: 0\n7: 1\n'7': 2\n", "b: 0\nc: 1\n? [a]\n: b\n"])
def test_a_key_that_is_lost_is_an_error_with_its_line(text):
    with pytest.raises(UserError, match=r"^f cannot be read as YAML: .* line 3\b"):
        parse_yaml(text, "f")


@pytest.mark.parametrize("text", ["a: !!binary eA==", "a: !!timestamp 2024-01-01", "a: !!int x", "!!set {a}", "a: !x"])
def test_tags_of_other_values_are_refused(text):
    with pytest.raises(UserError, match=r"^f cannot be read as YAML: "):
        parse_yaml(text, "f")
