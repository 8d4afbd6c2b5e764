"""lm-eval's Hugging Face model, with its requests shared among the processes of an evaluation."""

import math
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate.utils import find_executable_batch_size
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from moh_llm.errors import UserError
from moh_llm.evaluation.processes import BenchmarkError, Team

T = TypeVar("T")
# lm-eval would choose answers all the same, and score them.
NOT_FINITE = "the model computes values that are not finite; --compute-dtype float32 may help"


class LanguageModel(HFLM):
    """`HFLM` whose requests are answered by all processes, each once.

    Every process builds all prompts, answers its share, and gets the answers of the others. lm-eval would share the
    items instead, with examples drawn by process, so that scores would depend on the number of processes.

    With ``batch_size="auto"`` each set of requests begins with 64 sequences in a pass on a GPU, and takes fewer when
    memory runs out. lm-eval's own "auto" generates at the full context to find out. On a CPU, where a process that runs
    out of memory is killed, it begins with 8.
    """

    def __init__(self, model: str, batch_size: int | str, team: Team, **arguments: Any) -> None:
        self.finds_batch_size, self.team = batch_size == "auto", team
        self.cut = False
        """Whether some prompt was longer than the model's context and lost its beginning."""
        # A path, not a model object: only then does lm-eval put the model on this process's own device.
        # The backend is named because lm-eval does not know our model type.
        super().__init__(model, "causal", batch_size=8 if self.finds_batch_size else batch_size, **arguments)
        self.rows = self.model.get_input_embeddings().weight.shape[0]
        if (self.tokenizer.pad_token_id or 0) >= self.rows:  # a mask covers padding, whichever token it is
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        self._rank, self._world_size = 0, 1  # for lm-eval, which would share the items

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._answer(requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._answer(requests, super().loglikelihood_rolling)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._answer(requests, super().generate_until)

    def _answer(self, requests: list[Instance], compute: Callable[..., list[Any]]) -> list[Any]:
        """All answers, of which ``compute`` gives this process's share.

        Raises BenchmarkError on all processes when one fails.
        """
        own = requests[self.team.rank :: self.team.size]
        computed, problem = [], None
        try:
            computed = self._compute(own, compute) if own else []
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        answers: list[Any] = [None] * len(requests)
        for rank, theirs in enumerate(self.gather(computed, problem)):
            answers[rank :: self.team.size] = theirs
        return answers

    def _compute(self, requests: list[Instance], compute: Callable[..., list[Any]]) -> list[Any]:
        silent = self.team.rank > 0
        if not self.finds_batch_size:
            return compute(requests, disable_tqdm=silent)

        @find_executable_batch_size(starting_batch_size=8 if self.device.type == "cpu" else 64)
        def compute_in_batches(batch_size: int) -> list[Any]:
            self.batch_size_per_gpu = batch_size
            return compute(requests, disable_tqdm=silent)

        return compute_in_batches()

    def gather(self, result: T, problem: str | None = None) -> list[T]:
        """The results of all processes; raises BenchmarkError on all of them if one of them has a problem."""
        handed_in = self.team.gather((result, problem))
        if problems := [problem for _, problem in handed_in if problem]:
            raise BenchmarkError(problems[0])
        return [result for result, _ in handed_in]

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        longest = max((len(context) + len(continuation) for _, context, continuation in requests), default=0)
        self.cut |= longest > self.max_length + 1  # the last token is no input
        answers = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        if any(math.isnan(value) for value, _ in answers):
            raise ValueError(NOT_FINITE)
        return answers

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **options: Any
    ) -> Any:
        ids, mask = super().tok_batch_encode(strings, padding_side, None, **options)
        if left_truncate_len is None:
            return ids, mask
        self.cut |= ids.shape[1] > left_truncate_len
        return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    def _model_call(self, inps: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self._check_rows(inps)
        return super()._model_call(inps, *arguments, **options)

    def _model_generate(self, context: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self._check_rows(context)
        return super()._model_generate(context, *arguments, **options, logits_processor=[refuse_nan])

    def _check_rows(self, ids: torch.Tensor) -> None:
        """Raise UserError for an id without a row in the embedding, which would stop a GPU for good."""
        if (largest := int(ids.max())) >= self.rows:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"a text holds the token {token[:40]!r} (id {largest}), and the model embeds ids below vocab_size="
                f"{self.rows}; remove the token from its tokenizer, or give it a row: moh-llm convert BASE --tokenizer "
                "FOLDER"
            )


def refuse_nan(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Logits as they are, for `generate`. Raises ValueError where one is NaN or infinity."""
    if not (logits < math.inf).all():
        raise ValueError(NOT_FINITE)
    return logits


def load_model(
    model: str, batch_size: int | str, dtype: str, device: str, team: Team, commit: str | None = None
) -> LanguageModel:
    """Load a model; ``commit`` is that of one on the Hub. Raises UserError when it cannot be loaded."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "revision": commit or "main"}
    # A config may have been saved with other settings of a session.
    options |= {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
    try:
        # Safetensors only: a pickle from elsewhere could run anything.
        return LanguageModel(model, batch_size, team, use_safetensors=True, **options)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{model} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
