"""lm-eval's Hugging Face model: requests are shared among processes, answers are kept, and batches fit the memory."""

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import find_executable_batch_size
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedConfig

from moh_llm.data.tokenizer import tokens_without_rows
from moh_llm.errors import UserError
from moh_llm.evaluation.models import register_moh
from moh_llm.evaluation.processes import Answers, BenchmarkError, Team
from moh_llm.evaluation.shared_prefixes import check_cache, score_sharing_prefixes
from moh_llm.flops import feed_forward_width
from moh_llm.terminal import say_once

T = TypeVar("T")

_MOST_SEQUENCES = 64  # lm-eval's upper bound
_CPU_TOKENS = 4096  # passes of more tokens take longer in proportion
_SHARE_OF_FREE = 0.6  # the rest is for what the estimate leaves out, and for fragmentation


class LanguageModel(HFLM):
    """`HFLM` whose requests are answered by all processes, each once.

    Every process builds all prompts, answers its share, and gets the answers of the others. lm-eval would share the
    items instead, with examples drawn by process, so that scores would depend on the number of processes.

    With ``batch_size="auto"`` the longest request and the free memory decide, for each set of requests. lm-eval's own
    search tries batches until memory runs out, which on a CPU ends the process, and for tasks that generate at the full
    context. With ``share_prefixes`` log-likelihoods are those of `shared_prefixes`.
    """

    def __init__(
        self,
        model: str,
        batch_size: int | str,
        team: Team,
        answers: Answers | None = None,
        share_prefixes: bool = False,
        **arguments: Any,
    ) -> None:
        self.finds_batch_size = batch_size == "auto"
        self.team, self.answers, self.share_prefixes = team, answers or Answers(), share_prefixes
        # A path, not a model object: only then does lm-eval put the model on this process's own device.
        # The backend is named because lm-eval does not know our model type.
        super().__init__(model, "causal", batch_size=1 if self.finds_batch_size else batch_size, **arguments)
        if share_prefixes:
            check_cache(self.model)
        self.cache_hook = self.answers
        without = [t for t in tokens_without_rows(self.tokenizer, self.rows) if t != self.tokenizer.pad_token]
        if without:
            more = f" and {len(without) - 1:,} more tokens" if len(without) > 1 else ""
            what = f"its embedding has no row for the token {without[0][:40]!r}{more} of its tokenizer"
            say_once(f"{model}: {what}; text that holds one is refused")
        if (self.tokenizer.pad_token_id or 0) >= self.rows:  # a mask covers padding, whichever token it is
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        self._rank, self._world_size = 0, 1  # for lm-eval, which would share the items

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the embedding."""
        return self.model.get_input_embeddings().weight.shape[0]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._answer("loglikelihood", requests, super().loglikelihood)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._answer("loglikelihood_rolling", requests, super().loglikelihood_rolling)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._answer("generate_until", requests, self._generate_in_fitting_batches)

    def _answer(self, kind: str, requests: list[Instance], compute: Callable[..., list[Any]]) -> list[Any]:
        """Answers that are known, or that ``compute`` gives on this process or another.

        Raises BenchmarkError on all processes when one fails.
        """
        answers: dict[int, Any] = {}
        for number, request in enumerate(requests):
            sampled = kind == "generate_until" and request.args[1].get("do_sample")
            answers[number] = None if sampled else self.answers.find(kind, request.args)
        own = [number for number, answer in answers.items() if answer is None][self.team.rank :: self.team.size]
        computed, problem = {}, None
        try:
            if own:
                found = compute([requests[number] for number in own], disable_tqdm=self.team.rank > 0)
                computed = dict(zip(own, found, strict=True))
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}"
        for theirs in self.gather(computed, problem):
            answers |= theirs
        return [answers[number] for number in range(len(requests))]

    def gather(self, result: T, problem: str | None = None) -> list[T]:
        """The results of all processes; raises BenchmarkError on all of them if one of them has a problem."""
        handed_in = self.team.gather((result, problem))
        if problems := [problem for _, problem in handed_in if problem]:
            raise BenchmarkError(problems[0])
        return [result for result, _ in handed_in]

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        longest = max((len(context) + len(continuation) for _, context, continuation in requests), default=1)
        # The last token is no input.
        self.answers.cut |= longest > self.max_length + 1
        longest = min(longest, self.max_length)
        if self.share_prefixes:
            most = 1 if self.device.type == "cpu" else None  # a batch saves no time there, and is padded
            score = functools.partial(score_sharing_prefixes, self, requests, most, disable_tqdm)
        else:
            score = functools.partial(super()._loglikelihood_tokens, requests, disable_tqdm, override_bs)
        return self._in_fitting_batches(longest, longest, score)

    def _generate_in_fitting_batches(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompt, settings = max((request.args for request in requests), key=lambda args: len(args[0]))
        longest = len(self.tok_encode(prompt)) + settings.get("max_gen_toks", self.max_gen_toks)
        generate = functools.partial(super().generate_until, requests, disable_tqdm=disable_tqdm)
        return self._in_fitting_batches(min(longest, self.max_length), 1, generate)

    def _in_fitting_batches(self, tokens: int, scored: int, action: Callable[[], T]) -> T:
        """Run ``action`` with a batch size for sequences of ``tokens`` tokens, ``scored`` of them with logits."""
        if not self.finds_batch_size:
            return action()
        most = choose_batch_size(self.config, self.model.dtype, self.device, tokens, scored)

        @find_executable_batch_size(starting_batch_size=most)
        def run(batch_size: int) -> T:
            self.batch_size_per_gpu = batch_size
            return action()

        return run()

    def tok_encode(self, string: str, *arguments: Any, **options: Any) -> list[int]:
        ids = super().tok_encode(string, *arguments, **options)
        self._check_rows(ids)
        return ids

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **options: Any
    ) -> Any:
        ids, mask = super().tok_batch_encode(strings, padding_side, None, **options)
        self._check_rows(ids.flatten().tolist())
        if left_truncate_len is None:
            return ids, mask
        self.answers.cut |= ids.shape[1] > left_truncate_len
        return ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]

    def _check_rows(self, ids: list[int]) -> None:
        """Raise UserError for an id without a row in the embedding, which would end in an IndexError."""
        if (largest := max(ids, default=-1)) >= self.rows:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"a text holds the token {token[:40]!r} (id {largest}), and the model embeds ids below vocab_size="
                f"{self.rows}; remove the token from its tokenizer, or give it a row: moh-llm convert BASE --tokenizer "
                "FOLDER"
            )


def load_model(
    model: str,
    batch_size: int | str,
    dtype: str,
    device: str,
    team: Team,
    commit: str | None = None,
    answers: Answers | None = None,
    share_prefixes: bool = False,
) -> LanguageModel:
    """Load a model; ``commit`` is that of one on the Hub.

    Raises UserError when it cannot be loaded, and with ``share_prefixes`` when it cannot share them.
    """
    register_moh()
    options: dict[str, Any] = {"device": device, "dtype": dtype, "revision": commit or "main"}
    # A config may have been saved with other settings of a session.
    options |= {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
    try:
        # Safetensors only: a pickle from elsewhere could run anything.
        return LanguageModel(model, batch_size, team, answers, share_prefixes, use_safetensors=True, **options)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{model} cannot be loaded: {' '.join(str(error).split())[:300]}") from error


def choose_batch_size(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, tokens: int, scored: int
) -> int:
    """The power of two of sequences of ``tokens`` tokens, ``scored`` of them with logits, that fits on ``device``."""
    fit = int(_SHARE_OF_FREE * free_memory(device)) // bytes_per_sequence(config, dtype.itemsize, tokens, scored)
    if device.type == "cpu":
        fit = min(fit, _CPU_TOKENS // tokens)
    fit = max(1, min(fit, _MOST_SEQUENCES))
    return 1 << (fit.bit_length() - 1)


def bytes_per_sequence(config: PreTrainedConfig, itemsize: int, tokens: int, scored: int) -> int:
    """An estimate of the bytes that one sequence takes at the peak of a forward pass without gradients."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    logits = 2 * scored * config.vocab_size * itemsize  # and their log-probabilities
    cache = 2 * tokens * config.num_hidden_layers * groups * head_dim * itemsize
    # One layer at a time: residual, norms, queries, outputs; gate, up and their product.
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = feed_forward_width(config) if config.model_type == "moh_llama" else width
    layer = tokens * (4 * config.hidden_size + 2 * heads * head_dim + 3 * inner) * itemsize
    if getattr(config, "_attn_implementation", None) == "eager":
        layer += 2 * heads * tokens * tokens * 4
    return logits + cache + layer


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on a device, or of the machine's or container's memory for a CPU."""
    if device.type in ("cuda", "xpu"):
        backend = torch.get_device_module(device)
        free, _ = backend.mem_get_info(device)
        return free + backend.memory_reserved(device) - backend.memory_allocated(device)
    import psutil

    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()).isdecimal():
        free = min(free, max(0, int(limit) - int((group / "memory.current").read_text())))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
