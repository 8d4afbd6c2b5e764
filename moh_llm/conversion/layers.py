"""A checkpoint on disk as a sequence of layers, one of which is in memory at a time.

Hidden states pass from layer to layer, so that a model far larger than memory can run forward and backward.
"""

import copy
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from moh_llm.errors import UserError
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.tensors import EMBEDDING, HEAD, cast_weight, is_finite

_NORM = "model.norm.weight"


class LayerwiseModel:
    """The parts of a causal language model, read from disk on request, and run in ``dtype`` on ``device``.

    ``weight_map`` names each tensor's file in ``folder``. Weights are first cast to ``rounded``, the dtype in which
    they are written; None for their own.
    """

    def __init__(
        self,
        folder: Path,
        weight_map: dict[str, str],
        config: PreTrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        rounded: torch.dtype | None = None,
    ):
        self.folder, self.weight_map, self.config = folder, weight_map, config
        self.dtype, self.device, self.rounded = dtype, device, rounded

    def __len__(self) -> int:
        return self.config.num_hidden_layers

    def embed(self, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Embeddings `[B, T, C]` of batches of token ids `[B, T]`."""
        table = self._read([EMBEDDING])[EMBEDDING]
        return [nn.functional.embedding(ids.to(self.device), table) for ids in batches]

    def layer(self, number: int) -> nn.Module:
        """A model of that layer alone; `run_layer` runs it.

        It is the family's own model class with one layer, so that masks, rotary embedding and
        attention are the family's, too.
        """
        config = copy.deepcopy(self.config)
        config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[number]]
        if isinstance(config, MoHLlamaConfig):
            shared = self.config.shared_heads_per_layer[number]
            config.shared_heads, config.num_shared_heads = [shared], [len(shared)]
            config.num_active_heads = [self.config.active_heads_per_layer[number]]
            config.never_on_heads = self.config.never_on_heads and [self.config.never_on_heads[number]]
        with init_empty_weights(include_buffers=False):
            model = AutoModel.from_config(config)
        model.embed_tokens, model.norm = None, nn.Identity()
        prefix = f"model.layers.{number}."
        tensors = self._read([name for name in self.weight_map if name.startswith(prefix)])
        weights = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        model.layers[0].load_state_dict(_fuse_experts(weights), assign=True)
        return model.to(self.device).eval().requires_grad_(False)

    def head(self) -> nn.Module:
        """Final norm and language-modelling head: hidden states `[..., C]` to logits `[..., V]`."""
        head_name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        tensors = self._read([_NORM, head_name])
        with init_empty_weights(include_buffers=False):
            norm = LlamaRMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
            linear = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        norm.load_state_dict({"weight": tensors[_NORM]}, assign=True)
        linear.load_state_dict({"weight": tensors[head_name]}, assign=True)
        return nn.Sequential(norm, linear).to(self.device).eval().requires_grad_(False)

    def _read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors by name, cast and checked.

        Raises:
            UserError: a weight that is not a finite number, or is none in the dtype that it is cast to.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.weight_map[name], []).append(name)
        tensors = {}
        for file_name, inside in by_file.items():
            with safe_open(self.folder / file_name, framework="pt") as file:
                for name in inside:
                    # A copy: a view would keep the whole file mapped.
                    stored, where = file.get_tensor(name), f"{self.folder / file_name}: {name}"
                    rounded = cast_weight(stored, self.rounded or stored.dtype, where)
                    cast = cast_weight(rounded, self.dtype, where)
                    tensor = cast.to(self.device, copy=cast is stored)
                    if not is_finite(tensor):
                        raise UserError(f"{where} holds NaN or infinity; download it again")
                    tensors[name] = tensor
        return tensors


def _fuse_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's tensors by the names of transformers' modules, which hold Mixtral's experts in two tensors."""
    experts: dict[str, dict[int, torch.Tensor]] = {"w1": {}, "w2": {}, "w3": {}}
    named = {}
    for name, tensor in weights.items():
        if expert := re.fullmatch(r"block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight", name):
            experts[expert[2]][int(expert[1])] = tensor
        else:
            named[name.replace("block_sparse_moe.", "mlp.")] = tensor
    if experts["w1"]:
        gate, down, up = (torch.stack([of[number] for number in range(len(of))]) for of in experts.values())
        named |= {"mlp.experts.gate_up_proj": torch.cat([gate, up], dim=1), "mlp.experts.down_proj": down}
    return named


def run_layer(layer: nn.Module, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """One layer on hidden states `[B, T, C]`; documents are isolated where positions `[B, T]` restart."""
    positions = position_ids.to(hidden_states.device)
    return layer(inputs_embeds=hidden_states, position_ids=positions, use_cache=False).last_hidden_state


def check_finite(values: torch.Tensor, layer: int, what: str = "the output of") -> None:
    """Raise UserError where values of a layer are not finite: its weights are finite, but too large for their dtype."""
    if not is_finite(values):
        raise UserError(
            f"{what} layer {layer} is not finite in {values.dtype}: the base's weights overflow; download it again, or "
            "pass --compute-dtype float32"
        )
