"""Progress bar for several passes over a text, in tokens of the text."""

from collections.abc import Mapping
from types import TracebackType

from tqdm import tqdm

_FORMAT = "{desc} |{bar:12}| {percentage:.0f} %, {elapsed} gone, {remaining} left"


class TextProgress:
    """Shows how many tokens a pass has read, its rate, and the time left for all passes.

    Passes differ in work per token; the time left extrapolates the time per unit of work.

    Args:
        what: name of the job.
        tokens: number of tokens of the text; each pass reads all of them.
        passes: name -> work of each pass, in order and in one unit.
        show: whether to draw the bar.
    """

    def __init__(self, what: str, tokens: int, passes: Mapping[str, float], show: bool = True):
        self.tokens, self._passes = tokens, dict(passes)
        self._bar = tqdm(total=1.0, desc=what, bar_format=_FORMAT, smoothing=0, miniters=0, disable=not show)
        self._what, self._name, self._read = what, "", 0.0
        self._began = self._last = 0.0  # seconds at which the pass began, and tokens were last read

    def __enter__(self) -> "TextProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    @property
    def share_done(self) -> float:
        """Share of the total work that is done."""
        names = [*self._passes]
        before = sum(self._passes[name] for name in names[: names.index(self._name)]) if self._name else 0.0
        now = self._passes[self._name] * self._read / self.tokens if self._name else 0.0
        return (before + now) / sum(self._passes.values())

    def advance(self, name: str, tokens: float) -> None:
        """Count ``tokens`` more tokens of pass ``name``; some of a token's layers count as a fraction of it."""
        if name != self._name:
            self._name, self._read, self._began = name, 0.0, self._last
        self._read = min(self.tokens, self._read + tokens)
        self._last = self._bar.format_dict["elapsed"]
        seconds = self._last - self._began
        rate = f", {self._read / seconds:,.0f} tokens/s" if seconds > 0 else ""
        place = (
            f", pass {[*self._passes].index(name) + 1} of {len(self._passes)} ({name})"
            if self._passes.keys() - {name}
            else ""
        )
        text = f"{self._what}{place}: {self._read:,.0f} of {self.tokens:,} tokens{rate}"
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(self.share_done - self._bar.n)
