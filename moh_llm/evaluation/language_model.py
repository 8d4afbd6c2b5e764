"""lm-eval's Hugging Face model, loaded from a path, with a batch size that it finds by itself."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from moh_llm.errors import UserError
from moh_llm.evaluation.memory import choose_batch_size
from moh_llm.evaluation.models import register_moh
from moh_llm.evaluation.processes import Team
from moh_llm.evaluation.shared_prefixes import check_cache, score_sharing_prefixes

T = TypeVar("T")


class LanguageModel(HFLM):
    """`HFLM` that, with ``batch_size="auto"``, picks one for each set of requests and halves it when memory runs out.

    lm-eval's own search tries batches until memory runs out, which on a CPU ends the process, and for tasks
    that generate it tries them at the full context, which for a model of 131,072 tokens takes minutes and
    finds 1. Here the longest request and the free memory decide (`memory`).

    With ``share_prefixes`` log-likelihoods are those of `shared_prefixes`. Raises UserError for a model that cannot.
    """

    def __init__(
        self, model: str, batch_size: int | str, team: Team, share_prefixes: bool = False, **arguments: Any
    ) -> None:
        self.finds_batch_size = batch_size == "auto"
        self.share_prefixes = share_prefixes
        # A path, not a model object: only then does lm-eval put the model on this process's own device.
        # The backend is named because lm-eval does not know our model type.
        super().__init__(model, "causal", batch_size=1 if self.finds_batch_size else batch_size, **arguments)
        if share_prefixes:
            check_cache(self.model)
        # Items are shared out in `processes`: lm-eval would do so only with several GPUs on one machine.
        self._rank, self._world_size = 0, 1
        if team.rank > 0:  # one process draws the bars
            self.loglikelihood = functools.partial(self.loglikelihood, disable_tqdm=True)
            self.generate_until = functools.partial(self.generate_until, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        longest = max((len(context) + len(continuation) for _, context, continuation in requests), default=1)
        longest = min(longest, self.max_length)
        if self.share_prefixes:
            score = functools.partial(score_sharing_prefixes, self, requests, disable_tqdm)
        else:
            score = functools.partial(super()._loglikelihood_tokens, requests, disable_tqdm, override_bs)
        return self._in_fitting_batches(longest, longest, score)

    def generate_until(self, requests: list[Instance], *arguments: Any, **options: Any) -> list[str]:
        prompt, settings = max((request.args for request in requests), key=lambda args: len(args[0]), default=("", {}))
        longest = len(self.tok_encode(prompt)) + settings.get("max_gen_toks", self.max_gen_toks)
        generate = functools.partial(super().generate_until, requests, *arguments, **options)
        return self._in_fitting_batches(min(longest, self.max_length), 1, generate)

    def _in_fitting_batches(self, tokens: int, scored: int, action: Callable[[], T]) -> T:
        """Run ``action`` with a batch size for sequences of ``tokens`` tokens, ``scored`` of them with logits."""
        if not self.finds_batch_size:
            return action()
        self.batch_size_per_gpu = choose_batch_size(self.config, self.model.dtype, self.device, tokens, scored)
        while True:
            try:
                return action()
            except (RuntimeError, MemoryError) as error:
                # The longest requests come first (not with shared prefixes), so little work is lost.
                if self.batch_size_per_gpu == 1 or not _is_out_of_memory(error):
                    raise
            self.batch_size_per_gpu //= 2
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a GPU's or the CPU's allocator gave up."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def load_model(
    model: str,
    batch_size: int | str,
    dtype: str,
    device: str,
    team: Team,
    commit: str | None,
    share_prefixes: bool = False,
) -> HFLM:
    """Load a model; ``commit`` is that of one on the Hub.

    Raises UserError when it cannot be loaded, and with ``share_prefixes`` when it cannot share them.
    """
    register_moh()
    try:
        # Safetensors only: a pickle from elsewhere could run anything.
        return LanguageModel(
            model,
            batch_size,
            team,
            share_prefixes,
            device=device,
            dtype=dtype,
            revision=commit or "main",
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{model} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
