"""What `attention.py` measures over a cache: attention of one new token, and stacks of decoder layers."""

import statistics
from typing import Any

import torch
from attention_peers import (
    DEVICE,
    ON_CUDA,
    Clock,
    Peer,
    Row,
    Run,
    Shape,
    against,
    attempt,
    best_dense,
    distance,
    heads_on,
    lacking_memory,
    measure,
    random_gate,
)
from transformers import AutoModel, DynamicCache, LlamaConfig

from moh_llm.kernels.head_sparse_decoding import head_sparse_decoding
from moh_llm.kernels.head_sparse_kernels import triton
from moh_llm.modeling import MoHLlamaConfig

VOCABULARY = 1024
STEPS = 4  # tokens decoded in one call


def decode_rows(clock: Clock, shape: Shape, dtype: torch.dtype, context: int, batch: int) -> list[Row]:
    """One new token per row over a cache: dense, and with part of the groups or of the heads."""
    query = torch.randn(batch, shape.heads, 1, shape.size, device=DEVICE, dtype=dtype)
    size = (batch, shape.groups, context, shape.size)
    inputs = (query, *(torch.randn(size, device=DEVICE, dtype=dtype) for _ in range(2)))
    dense, group_size = best_dense(clock, inputs, None, 0.0), shape.heads // shape.groups
    dense.cache_bytes = 2 * inputs[1].nbytes

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return head_sparse_decoding(q, k, v, gate, shape.size**-0.5).reshape(batch, 1, shape.heads, shape.size)

    found = [dense]
    for name, share in (("groups", 100), ("groups", 75), ("groups", 50), ("heads", 75)) if triton else ():
        gate = random_gate(batch, 1, shape.heads, share, group_size if name == "groups" else 1)
        used = (
            gate.unflatten(-1, (shape.groups, group_size)).amax(-1).mean().item()
        )  # a group is read if a head of it is on
        found.append(Peer(f"MoH by {name}", share, attend, (*inputs, gate), ours=True))
        found[-1].cache_bytes = used * dense.cache_bytes
    return measure(clock, found)


class Stack:
    """Decoders with the same weights: dense, MoH masked and, with Triton, MoH head-sparse.

    MoH is the paper's layer, by heads and by groups, and the linear router with value and with local fallbacks.
    """

    def __init__(self, clock: Clock, shape: Shape, layers: int, share: int, dtype: torch.dtype, window: int):
        self.clock, self.shape, self.layers, self.dtype = clock, shape, layers, dtype
        fields = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "vocab_size": VOCABULARY}
        fields |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.groups}
        fields["num_hidden_layers"] = layers
        group_size = shape.heads // shape.groups
        on, in_groups = heads_on(share, shape.heads), heads_on(share, shape.groups) * group_size
        routed = {"num_shared_heads": on // 2, "num_active_heads": on}
        whole = {"num_shared_heads": in_groups // group_size // 2 * group_size, "num_active_heads": in_groups}
        linear = routed | {"router_type": "linear"}
        plans = {
            "MoH": routed,
            "MoH, value": linear | {"head_fallback": "value"},
            "MoH, local": linear | {"head_fallback": "local", "local_window": window},
            "MoH by groups": whole | {"routing_granularity": "kv_group"},
        }
        self.models: dict[str, Any] = {}
        self.shares = {"dense, sdpa": 100}
        self._add("dense, sdpa", LlamaConfig(**fields), dtype)
        for plan, more in plans.items():
            for kind in ("sdpa", "moh_sparse") if triton else ("sdpa",):
                if plan == "MoH by groups" and kind == "sdpa":  # costs what "MoH" does
                    continue
                self._add(f"{plan}, {kind}", MoHLlamaConfig(**fields, **more), dtype)
                self.shares[f"{plan}, {kind}"] = round(100 * more["num_active_heads"] / shape.heads)

    def _add(self, name: str, config: LlamaConfig, dtype: torch.dtype) -> None:
        """A model with the weights of the dense one and, where it was added, of the same layer with SDPA."""
        plan, kind = name.rsplit(", ", 1)
        with torch.device(DEVICE):
            model = AutoModel.from_config(config, dtype=dtype, attn_implementation=kind).eval()
        for same in ("dense, sdpa", f"{plan}, sdpa"):
            if same in self.models:
                model.load_state_dict(self.models[same].state_dict(), strict=False, assign=True)
        self.models[name] = model

    def cache_bytes(self, context: int, batch: int) -> int:
        """Of all layers."""
        return 2 * self.layers * batch * context * self.shape.groups * self.shape.size * self.dtype.itemsize

    def rows(self, context: int, batch: int) -> list[Row]:
        """Prefill and decoding of all models; a row that says so where the memory is too small."""
        found: list[Row] = []
        for name in ("prefill", "decode"):
            # Prefill holds the activations of one layer, in part in float32; the cache copies a layer to add a token.
            width = (3 * self.shape.intermediate + 8 * self.shape.hidden) * self.dtype.itemsize + 12 * self.shape.hidden
            extra = batch * context * width if name == "prefill" else self.cache_bytes(context, batch) / self.layers
            if words := lacking_memory(self.cache_bytes(context, batch) + extra + 2**28):
                found.append({"pass": name, "path": words})
                continue
            found += [row | {"pass": name} for row in self.measured(context, batch, decoding=name == "decode")]
        return found

    def measured(self, context: int, batch: int, decoding: bool) -> list[Row]:
        """A row per model."""
        ids = torch.randint(0, VOCABULARY, (batch, 1 if decoding else context), device=DEVICE)
        cache, rows, runs, tokens = None, [], {}, batch * (STEPS if decoding else context)
        if decoding:
            cache = DynamicCache()
            for layer in range(self.layers):
                size = (batch, self.shape.groups, context, self.shape.size)
                cache.update(*(torch.randn(size, device=DEVICE, dtype=self.dtype) for _ in range(2)), layer)
        for name, model in self.models.items():
            run, interpreted = stack_run(model, ids, cache), not ON_CUDA and name.endswith("moh_sparse")
            row = {"path": name, "share": self.shares[name], "ours": name.startswith("MoH"), "failed": attempt(run)}
            rows.append(row)
            masked = self.models.get(name.replace("moh_sparse", "sdpa"))
            if name.endswith("moh_sparse") and masked is not None and not row["failed"]:
                row["error"] = distance(run(), stack_run(masked, ids, cache)())
            if not row["failed"] and not interpreted:
                runs[name] = run
        times = self.clock.turns(runs)
        for row in rows:
            if (taken := times.get(row["path"])) and "dense, sdpa" in times:
                row |= against(taken, times["dense, sdpa"])
                row["tokens_s"] = 1e3 * tokens / statistics.median(taken)
                row["ms"] /= STEPS if decoding else 1  # of a step
        return rows


def stack_run(model: Any, ids: torch.Tensor, cache: DynamicCache | None) -> Run:
    """Prefill of `ids`, or, given a cache, `STEPS` times `ids` after it, which are then taken off again."""

    @torch.no_grad()
    def prefill() -> torch.Tensor:
        return model(input_ids=ids, use_cache=True).last_hidden_state

    @torch.no_grad()
    def decode() -> torch.Tensor:
        before = cache.get_seq_length()
        try:
            for _ in range(STEPS):
                out = model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        finally:
            for layer in cache.layers:  # each by what it has, for a call may have broken off between two
                layer.crop(before - layer.get_seq_length())
        return out

    return prefill if cache is None else decode
