"""lm-eval's Hugging Face model, loaded from a path, with a batch size chosen from the free memory."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedConfig

from moh_llm.data.tokenizer import tokens_without_rows
from moh_llm.devices import empty_cache
from moh_llm.errors import UserError
from moh_llm.evaluation.models import register_moh
from moh_llm.evaluation.processes import Team
from moh_llm.evaluation.shared_prefixes import check_cache, score_sharing_prefixes
from moh_llm.flops import feed_forward_width
from moh_llm.terminal import say_once

T = TypeVar("T")

# lm-eval's own upper bound. On a CPU, passes of more tokens than this take longer in proportion.
_MOST_SEQUENCES = 64
_CPU_TOKENS = 4096
# The rest is for what is not counted and for fragmentation.
_SHARE_OF_FREE = 0.6


class LanguageModel(HFLM):
    """`HFLM` that, with ``batch_size="auto"``, chooses one for each set of requests and halves it when memory runs out.

    lm-eval's own search tries batches until memory runs out, which on a CPU ends the process. For tasks that
    generate it tries them at the full context, which for a model of 131,072 tokens takes minutes and
    finds 1. Here the longest request and the free memory decide.

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
        without = [t for t in tokens_without_rows(self.tokenizer, self.rows) if t != self.tokenizer.pad_token]
        if without:
            more = f" and {len(without) - 1:,} more tokens" if len(without) > 1 else ""
            what = f"its embedding has no row for the token {without[0][:40]!r}{more} of its tokenizer"
            say_once(f"{model}: {what}; text that holds one is refused")
        if (self.tokenizer.pad_token_id or 0) >= self.rows:  # a mask covers padding, whichever token it is
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(0)
        # `scoring` distributes the items: lm-eval would do so only with several GPUs on one machine.
        self._rank, self._world_size = 0, 1
        if team.rank > 0:  # one process draws the bars
            self.loglikelihood = functools.partial(self.loglikelihood, disable_tqdm=True)
            self.generate_until = functools.partial(self.generate_until, disable_tqdm=True)

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the embedding."""
        return self.model.get_input_embeddings().weight.shape[0]

    def tok_encode(self, string: str, *arguments: Any, **options: Any) -> list[int]:
        ids = super().tok_encode(string, *arguments, **options)
        self._check_rows(ids)
        return ids

    def tok_batch_encode(self, strings: list[str], *arguments: Any, **options: Any) -> Any:
        ids, mask = super().tok_batch_encode(strings, *arguments, **options)
        self._check_rows(ids.flatten().tolist())
        return ids, mask

    def _check_rows(self, ids: list[int]) -> None:
        """Raise UserError for an id without a row in the embedding, which would end in an IndexError."""
        if (largest := max(ids, default=-1)) >= self.rows:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"a text holds the token {token!r} (id {largest}), and the model embeds ids below vocab_size="
                f"{self.rows}; remove the token from its tokenizer, or give it a row: moh-llm convert BASE --tokenizer "
                "FOLDER"
            )

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
                # A GPU's allocator or the CPU's. The longest requests come first (not with shared prefixes), so
                # little work is lost.
                out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
                out_of_memory = out_of_memory or "can't allocate memory" in str(error)
                if self.batch_size_per_gpu == 1 or not out_of_memory:
                    raise
            self.batch_size_per_gpu //= 2
            empty_cache()


def load_model(
    model: str,
    batch_size: int | str,
    dtype: str,
    device: str,
    team: Team,
    commit: str | None,
    share_prefixes: bool = False,
) -> LanguageModel:
    """Load a model; ``commit`` is that of one on the Hub.

    Raises UserError when it cannot be loaded, and with ``share_prefixes`` when it cannot share them.
    """
    register_moh()
    options: dict[str, Any] = {"device": device, "dtype": dtype, "revision": commit or "main"}
    # Whatever settings of a session its config was saved with.
    options |= {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
    try:
        # Safetensors only: a pickle from elsewhere could run anything.
        return LanguageModel(model, batch_size, team, share_prefixes, use_safetensors=True, **options)
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
    """Bytes that one sequence takes at the peak of a forward pass without gradients, about."""
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
    """Bytes that this process may still take on a device; without memory of its own, its part of the machine's.

    In a container of what that has.
    """
    if device.type in ("cuda", "xpu"):
        backend = torch.get_device_module(device)
        free, _ = backend.mem_get_info(device)
        return free + backend.memory_reserved(device) - backend.memory_allocated(device)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # where nothing better is known
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()).isdecimal():
        free = min(free, max(0, int(limit) - int((group / "memory.current").read_text())))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
