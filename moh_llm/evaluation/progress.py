"""How far an evaluation is, and for how long it will go on."""

from collections.abc import Mapping


class Progress:
    """Items of every benchmark on every model, and the seconds of those that are done."""

    def __init__(self, models: list[str], items: Mapping[str, int]) -> None:
        """``items``: how many each benchmark scores on each of ``models``."""
        self._items = dict(items)
        self._open = [(model, benchmark) for model in models for benchmark in items]
        self._seconds: dict[tuple[str, str], float] = {}

    def done(self, model: str, benchmark: str, seconds: float | None) -> None:
        """Note a benchmark as done in ``seconds``; None for one that failed and tells nothing."""
        self._open.remove((model, benchmark))
        if seconds is not None:
            self._seconds[model, benchmark] = seconds

    def seconds_left(self) -> float | None:
        """An estimate: a benchmark takes as long as on another model, else the time per item so far. None: unknown."""
        known = sum(self._items[benchmark] for _, benchmark in self._seconds)
        if not known:
            return None if self._open else 0.0
        per_item = sum(self._seconds.values()) / known
        left = 0.0
        for _, benchmark in self._open:
            elsewhere = [seconds for (_, other), seconds in self._seconds.items() if other == benchmark]
            left += max(elsewhere, default=per_item * self._items[benchmark])
        return left


def spell_seconds(seconds: float) -> str:
    """``8 s``, ``14 min`` or ``3 h 20 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
