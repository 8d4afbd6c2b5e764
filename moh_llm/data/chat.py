"""Conversations and instructions as text, with the characters that the loss is taken on.

Records have the fields that TRL's trainers take: `messages`, or `prompt` and `completion` (two texts or two lists of
messages), and beside messages also `tools` and `chat_template_kwargs`. The tokenizer's chat template turns messages
into text.
"""

import hashlib
import json
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from moh_llm.data.mixture import CHAT_DATE

FIELDS = {"messages": ("messages",), "prompt_completion": ("prompt", "completion")}
OPTIONS = ("tools", "chat_template_kwargs")
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatText(str):
    """The text of a record and the parts of it that the loss is taken on.

    Attributes:
        spans: ranges of characters that the loss is taken on, in ascending order.
        templated: whether a chat template wrote it, special tokens included, so that the tokenizer adds none.
        group: the text as of `CHAT_DATE`; decides whether it is held out, whatever date the template writes.
    """

    __slots__ = ("group", "spans", "templated")

    spans: tuple[tuple[int, int], ...]
    templated: bool
    group: str

    @classmethod
    def from_spans(cls, text: str, spans: list[tuple[int, int]], templated: bool) -> "ChatText":
        """Half a surrogate pair, which JSON can hold, becomes a question mark."""
        made = cls(text.encode("utf-8", "replace").decode())
        made.spans, made.templated, made.group = tuple(spans), templated, str(made)
        return made

    def targets(self, offsets: list[tuple[int, int]], closed: bool) -> np.ndarray:
        """Whether the loss is taken on each token, bool `[N]`: on those that hold a character of a span.

        Args:
            offsets: the range of characters of each token.
            closed: whether an end-of-sequence token of no characters was added; it counts with the last character.
        """
        # Ends ascend, except at special tokens that the tokenizer added, whose range is (0, 0). Beginnings do not
        # serve: some tokenizers leave a leading space out of the range.
        ends = np.maximum.accumulate(np.array([end for _, end in offsets] + [len(self)] * closed, dtype=np.int64))
        found = np.zeros(len(ends), dtype=bool)
        for low, high in self.spans:
            last = max(int((ends < high).sum()) + 1, int((ends <= high).sum()))
            found[int((ends <= low).sum()) : last] = True
        return found


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template (Jinja) and the special tokens that it may name, as JSON.

    `date` is what it writes where it asks for today's date, so that the text is the same on all days.
    """

    template: str
    special_tokens: str
    date: str = CHAT_DATE

    @property
    def reads_clock(self) -> bool:
        """Whether the text may depend on the date."""
        return "strftime_now" in self.template

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> "ChatTemplate | None":
        """The (default) template of a Hugging Face tokenizer; None where it has none."""
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            return None
        return cls(template, json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str))

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of everything but the date that decides the text of messages."""
        return hashlib.sha256(json.dumps([self.template, self.special_tokens]).encode()).hexdigest()

    def text_of(self, messages: list[dict], first: int, options: dict[str, Any]) -> ChatText:
        """The text of messages; the spans are what the assistant says from message `first` on.

        Args:
            messages: maps with `role` and `content`.
            first: the number of messages that only prompt.
            options: further arguments of the template.

        Raises:
            ValueError: none of the messages is the assistant's, or the template does not show which text is.
        """
        if not first and _MARKERS.search(self.template):
            text, marked = self._render(messages, options, markers=True)
            spans = [(low, high) for low, high in marked if low < high]
        else:
            text = self._render(messages, options)[0]
            spans = self._assistant_turns(messages, first, text, options)
        if not spans:
            raise ValueError("no message is the assistant's, so there is nothing to learn from it")
        return ChatText.from_spans(text, spans, templated=True)

    def _assistant_turns(
        self, messages: list[dict], first: int, text: str, options: dict[str, Any]
    ) -> list[tuple[int, int]]:
        """Ranges of the assistant's turns from message `first` on. A turn begins after the generation prompt."""
        spans = []
        for number in range(first, len(messages)):
            if messages[number]["role"] != "assistant":
                continue
            before = self._render(messages[:number], options, add_generation_prompt=True)[0]
            upto = text if number + 1 == len(messages) else self._render(messages[: number + 1], options)[0]
            if not text.startswith(upto):  # some templates close a conversation after its last message, whichever it is
                upto = upto.removesuffix(json.loads(self.special_tokens).get("eos_token") or "")
            if not (text.startswith(upto) and text.startswith(before) and len(before) < len(upto)):
                raise ValueError(
                    f"the chat template writes the text up to message {number + 1} differently when more messages "
                    "follow, so the assistant's text cannot be found; use a template with {% generation %} markers"
                )
            spans.append((len(before), len(upto)))
        return spans

    def _render(
        self, messages: list[dict], options: dict[str, Any], markers: bool = False, **more: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {**json.loads(self.special_tokens), **options, **more}
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                chat_template=self._reproducible_template(),
                return_assistant_tokens_mask=markers,
                **given,
            )
        # A template may raise any exception.
        except Exception as error:
            raise ValueError(f"the chat template cannot write it: {' '.join(str(error).split())[:160]}") from error
        return texts[0], spans[0] if markers else []

    def _reproducible_template(self) -> str:
        """The template, compiled by transformers with `date` for the clock and without chance.

        transformers caches compiled templates by their text, and others may use this one with the clock: the comment,
        which writes nothing, makes it another text.
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        text = f"{{# as of {self.date} #}}\n{self.template}"
        compiled = _compile_jinja_template(text)
        if compiled is not _compile_jinja_template(text):
            raise RuntimeError("this version of transformers compiles a chat template each time")
        compiled.globals |= {"strftime_now": datetime.fromisoformat(self.date).strftime, "lipsum": _refuse_chance}
        compiled.environment.filters["random"] = _refuse_chance
        return text


def _refuse_chance(*_: Any, **__: Any) -> None:
    raise ValueError("it draws at random (random, lipsum), so its text would differ each time")


def read_chat(kind: str, values: dict[str, Any], template: ChatTemplate | None, date: str = CHAT_DATE) -> ChatText:
    """The text of a record.

    Args:
        kind: `messages` or `prompt_completion`.
        values: its fields of `FIELDS` and `OPTIONS`; None for one that it lacks.
        template: the tokenizer's; None where it has none.
        date: what the template writes for today's.

    Raises:
        ValueError: what is wrong with the record, in words that follow its place.
    """
    missing = [name for name in FIELDS[kind] if values[name] is None]
    if missing:
        raise ValueError(f"no field {' or '.join(missing)}")
    prompt, completion = values.get("prompt"), values.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise ValueError("its completion is empty")
        text = prompt + completion
        return ChatText.from_spans(text, [(len(prompt), len(text))], templated=False)
    if template is None:
        raise ValueError("it has messages, and the tokenizer has no chat template")
    before = [] if kind == "messages" else _checked(prompt, "prompt")
    name = FIELDS[kind][-1]
    messages, options = before + _checked(values[name], name), _options(values)
    text = replace(template, date=date).text_of(messages, len(before), options)
    if template.reads_clock and date != CHAT_DATE:
        text.group = str(template.text_of(messages, len(before), options))
    return text


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the template. Tools may be JSON in a text, as in parquet files."""
    tools, more = values["tools"], values["chat_template_kwargs"] or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise ValueError(f"its tools are no JSON ({error})") from error
    if not isinstance(tools, list | None) or not isinstance(more, dict):
        raise ValueError("its tools must be a list, and its chat_template_kwargs a map")
    return {"tools": tools or None, **more}


def _checked(messages: Any, name: str) -> list[dict]:
    """The messages without the null fields that parquet adds for columns of other messages."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"its {name} must be a list of messages, or prompt and completion must both be texts")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"its {name} must be maps with role and content")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
