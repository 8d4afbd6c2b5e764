"""How many tokens a mixture's text will make, and in what time, from the beginning of each source."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moh_llm.data.embedded import embedded_documents
from moh_llm.data.records import Reading, read_documents
from moh_llm.data.tasks import Task
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError

_SAMPLE = 2 << 20  # bytes of text that are tokenised


@dataclass(frozen=True)
class Estimate:
    """Of one source: tokens in all, and the tokenizer's seconds on all cores of this machine.

    Both are None where the stored size is not known (files on a server that was not asked).
    """

    tokens: int | None
    seconds: float | None


def estimate_source(tasks: Sequence[Task], tokenizer: TextTokenizer) -> Estimate:
    """Tokenise the first 2 MiB of a source's text and scale by its stored bytes.

    Compressed files are read in pieces, so that the figure is off by some percent even where the
    rest of the source is like its beginning.

    Args:
        tasks: those of one source.
        tokenizer: what text is tokenised with.

    Raises:
        UserError: the beginning cannot be read.
    """
    sample, sampled, stored, whole, ended = [], 0, 0, 0, True
    for text, position in _documents(tasks):
        size = len(text.encode())
        whole += size
        if sampled < _SAMPLE:
            sample.append(text)
            sampled, stored = sampled + size, position
        elif tasks[0].files:  # only built-in text, which is short, is read to its end
            ended = False
            break
    if not sample:
        raise UserError(f"source {tasks[0].source.name} holds no text")
    began = time.perf_counter()
    tokens = sum(len(ids) for _, ids in tokenizer.encode(sample))
    seconds = time.perf_counter() - began
    if not tasks[0].files:
        scale = whole / sampled
    elif ended:
        scale = 1.0
    else:
        sizes = [task.bytes for task in tasks]
        if None in sizes or not stored:
            return Estimate(None, None)
        scale = sum(size or 0 for size in sizes) / stored
    return Estimate(round(tokens * scale), seconds * scale)


def _documents(tasks: Sequence[Task]) -> Iterator[tuple[str, int]]:
    """Each document with the stored bytes read up to its end."""
    if tasks[0].source.builtin is not None:
        yield from ((text, 0) for _, text in embedded_documents(tasks[0].source.builtin))
        return
    before = at = 0

    def tell(position: int) -> None:
        nonlocal at
        at = position

    reading = Reading(skip_bad=True)  # a bad record is for the run itself to report
    for file in (file for task in tasks for file in task.files):
        at = 0
        for text in read_documents(file, tasks[0].source, reading, tell):
            yield text, before + at
        before += file.size or at
