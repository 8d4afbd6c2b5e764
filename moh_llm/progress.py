"""Progress bar of several passes over a text."""

from collections.abc import Mapping

from tqdm import tqdm

_FORMAT = "{desc} |{bar:12}| {percentage:.0f} %, {remaining} left"


class TextProgress(tqdm):  # type: ignore[type-arg]
    """Shows which pass reads the text, and the time left for all passes.

    Args:
        what: name of the job.
        tokens: number of tokens of the text; each pass reads all of them.
        passes: name -> work of each pass, in order and in one unit: a backward pass takes longer than a forward one.
    """

    def __init__(self, what: str, tokens: int, passes: Mapping[str, float]):
        self._what, self._tokens, self._passes, self._read = what, tokens, passes, dict.fromkeys(passes, 0.0)
        work = sum(passes.values())
        super().__init__(total=work, desc=what, bar_format=_FORMAT, smoothing=0, miniters=0, leave=False)

    def advance(self, name: str, tokens: float) -> None:
        """Count ``tokens`` more tokens of pass ``name``; some of a token's layers count as a fraction of it."""
        self._read[name] += tokens
        told = f"{self._what} {name}: {self._read[name]:,.0f} of {self._tokens:,} tokens"
        self.set_description_str(told, refresh=False)
        work = self._passes[name] * tokens / self._tokens
        self.update(min(work, self.total - self.n))  # a sum of fractions may be just above the whole
