"""Progress of tokenising, read from what the tasks leave on disk, whichever process does them."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm

from moh_llm.data.tasks import Task
from moh_llm.errors import UserError
from moh_llm.reading import read_json

_SECONDS = 0.5  # between two looks


@contextmanager
def show_progress(tasks: Sequence[Task]) -> Iterator[None]:
    """A bar over the stored bytes of all tasks, done and running, with tokens per second and time left."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(tasks, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(tasks: Sequence[Task], stop: threading.Event) -> None:
    sizes = _weights(tasks)
    done: dict[int, int] = {}  # task -> tokens
    began, at_start = time.perf_counter(), sum(_state(task)[1] for task in tasks)
    style = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=sum(sizes), desc="tokenize", bar_format=style) as bar:
        last = False
        while not last:
            last = stop.wait(_SECONDS)
            share = tokens = 0.0
            for number, task in enumerate(tasks):
                part, found = (1.0, done[number]) if number in done else _state(task)
                if part == 1.0:
                    done[number] = found
                share, tokens = share + part * sizes[number], tokens + found
            rate = (tokens - at_start) / (time.perf_counter() - began)
            bar.set_postfix_str(f"{tokens / 1e6:.2f}M tokens, {rate / 1e3:.0f}k tokens/s")
            bar.update(max(0.0, share - bar.n))


def _weights(tasks: Sequence[Task]) -> list[float]:
    """Stored bytes of each task; where they are not known, the mean of the others."""
    known = [task.bytes for task in tasks if task.bytes is not None]
    mean = sum(known) / len(known) if known else 1
    return [mean if task.bytes is None else task.bytes for task in tasks]


def _state(task: Task) -> tuple[float, int]:
    """Share of the task that is done, and its tokens so far."""
    try:
        return 1.0, int(read_json(task.record)["tokens"])
    except (UserError, KeyError):
        pass
    try:
        stored, tokens = map(int, task.progress.read_text().split())
    except (OSError, ValueError):
        return 0.0, 0
    return min(0.99, stored / task.bytes) if task.bytes else 0.0, tokens
