"""Conversations and instructions as text, with the characters that the loss is taken on.

Records have the fields that TRL's trainers take: `messages`, or `prompt` and `completion` (two texts or two lists of
messages), and beside messages also `tools` and `chat_template_kwargs`. The tokenizer's chat template turns messages
into text.

transformers' `return_assistant_tokens_mask` does not serve: it needs a template with markers, which few models have,
and loses turns where a tokenizer leaves spaces out of its offsets.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

FIELDS = {"messages": ("messages",), "prompt_completion": ("prompt", "completion")}
OPTIONS = ("tools", "chat_template_kwargs")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template that asks for today's date gets the one that Llama 3's write without a clock: shards are the same on all
# days. transformers passes no functions to templates, hence a macro, which takes the place of its clock.
_CLOCK = (
    "{%- macro strftime_now(format) -%}{{ format | replace('%d', '26') | replace('%m', '07') | replace('%b', 'Jul') | "
    "replace('%B', 'July') | replace('%Y', '2024') }}{%- endmacro %}\n"
)


class ChatText(str):
    """The text of a record and the parts of it that the loss is taken on.

    Attributes:
        spans: ranges of characters that the loss is taken on, in ascending order.
        templated: whether a chat template wrote it, special tokens included, so that the tokenizer adds none.
    """

    __slots__ = ("spans", "templated")

    spans: list[tuple[int, int]]
    templated: bool

    @classmethod
    def from_spans(cls, text: str, spans: list[tuple[int, int]], templated: bool) -> "ChatText":
        """A text and its spans."""
        made = cls(in_utf8(text))
        made.spans, made.templated = spans, templated
        return made

    def targets(self, offsets: list[tuple[int, int]], closed: bool) -> np.ndarray:
        """Whether the loss is taken on each token, bool `[N]`: on those that hold a character of a span.

        ``offsets`` are the tokens' ranges of characters. If the text is ``closed``, an end-of-sequence token of no
        characters follows; it counts with the last character.
        """
        # Ends ascend, except at special tokens that the tokenizer added, whose range is (0, 0). Beginnings do not
        # serve: some tokenizers leave a leading space out of the range.
        ends = np.maximum.accumulate(np.array([end for _, end in offsets] + [len(self)] * closed, dtype=np.int64))
        found = np.zeros(len(ends), dtype=bool)
        for low, high in self.spans:
            last = max(int((ends < high).sum()) + 1, int((ends <= high).sum()))
            found[int((ends <= low).sum()) : last] = True
        return found


def in_utf8(text: str) -> str:
    """The text with a question mark for half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template (Jinja) and the special tokens that it may name."""

    template: str
    special_tokens: dict[str, Any]

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> "ChatTemplate | None":
        """The (default) template of a Hugging Face tokenizer; None where it has none."""
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        return cls(template, tokenizer.special_tokens_map) if isinstance(template, str) and template else None

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of everything that decides the text of messages."""
        content = json.dumps([self.template, self.special_tokens], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def text_of(self, messages: list[dict], first: int, options: dict[str, Any]) -> ChatText:
        """The text of messages; the spans are what the assistant says from message `first` on.

        Raises:
            ValueError: none of the messages is the assistant's, or the template does not show which text is.
        """
        if not first and _MARKERS.search(self.template):
            text, marked = self._render(messages, return_assistant_tokens_mask=True, **options)
            spans = [(low, high) for low, high in marked[0] if low < high]
        else:
            text = self._render(messages, **options)[0]
            turns = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
            spans = [self._find_turn(messages, number, text, options) for number in turns]
        if not spans:
            raise ValueError("no message is the assistant's, so there is nothing to learn from it")
        return ChatText.from_spans(text, spans, templated=True)

    def _find_turn(self, messages: list[dict], number: int, text: str, options: dict[str, Any]) -> tuple[int, int]:
        """Where message `number` is in the text: from the generation prompt to the beginning of the next message."""
        before = self._render(messages[:number], add_generation_prompt=True, **options)[0]
        upto = text if number + 1 == len(messages) else self._render(messages[: number + 1], **options)[0]
        if not text.startswith(upto):  # some templates close a conversation after its last message, whichever it is
            upto = upto.removesuffix(self.special_tokens.get("eos_token") or "")
        if not (text.startswith(upto) and text.startswith(before) and len(before) < len(upto)):
            raise ValueError(
                f"the chat template writes the text up to message {number + 1} differently when more messages "
                "follow, so the assistant's text cannot be found; use a template with {% generation %} markers"
            )
        return len(before), len(upto)

    def _render(self, messages: list[dict], **options: Any) -> tuple[str, Any]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages], chat_template=_CLOCK + self.template, **{**self.special_tokens, **options}
            )
        # A template may raise any exception.
        except Exception as error:
            raise ValueError(f"the chat template cannot write it: {' '.join(str(error).split())[:160]}") from error
        return texts[0], spans


def read_chat(kind: str, record: dict[str, Any], template: ChatTemplate | None) -> ChatText:
    """The text of a record of ``kind`` `messages` or `prompt_completion`; a tokenizer may have no ``template``.

    Raises:
        ValueError: what is wrong with the record, in words that follow its place.
    """
    if missing := [name for name in FIELDS[kind] if record.get(name) is None]:
        raise ValueError(f"no field {' or '.join(missing)}")
    prompt, completion = record.get("prompt"), record.get("completion")
    if kind != "messages" and isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ValueError("its completion is empty")
        text = prompt + completion
        return ChatText.from_spans(text, [(len(prompt), len(text))], templated=False)
    if template is None:
        raise ValueError("it has messages, and the tokenizer has no chat template")
    parts = [_checked(record[name], name) for name in FIELDS[kind]]
    tools, arguments = record.get("tools"), record.get("chat_template_kwargs") or {}
    tools = json.loads(tools) if isinstance(tools, str) else tools  # JSON in a text, as in parquet files
    if not isinstance(tools, list | None) or not isinstance(arguments, dict):
        raise ValueError("its tools must be a list, and its chat_template_kwargs a map")
    first = len(parts[0]) if kind == "prompt_completion" else 0
    messages = [message for part in parts for message in part]
    return template.text_of(messages, first, {"tools": tools or None} | arguments)


def _checked(messages: Any, name: str) -> list[dict]:
    """The messages without the null fields that parquet adds for columns of other messages."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"its {name} must be a list of messages, or prompt and completion must both be texts")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"its {name} must be maps with role and content")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
