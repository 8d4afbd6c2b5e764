"""The load-balance loss in trainers that compute their own loss from hidden states, as TRL's do."""

from typing import Any

import torch
from torch import nn

from moh_llm.errors import UserError
from moh_llm.modeling.experts_moh import expert_balancing_loss
from moh_llm.modeling.routing_moh import load_balancing_loss


class HeadBalanceMixin:
    """Adds the load-balance loss of heads (Eq. 7) to the loss of a `transformers.Trainer`, and that of experts.

    For trainers that do not call the model's own loss:

        class BalancedSFTTrainer(HeadBalanceMixin, SFTTrainer): ...

    The losses are weighted by the config's ``head_balance_coef`` and ``expert_balance_coef``. They are the mean over
    the forward passes that `compute_loss` makes with gradients, which leaves out a reference model's. Micro-batches of
    a step have the same weight. Threshold routers have no load-balance loss.

    Raises:
        UserError: the model is not a MoH model, or its config adds the load-balance loss itself.
    """

    def compute_loss(self: Any, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of the trainer's own `compute_loss` with the load-balance loss added."""
        backbone = find_backbone(model)
        losses: list[torch.Tensor] = []

        def ask(module: nn.Module, positional: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            asked = dict.fromkeys(("output_router_logits", "output_expert_logits"), torch.is_grad_enabled())
            return positional, named | asked

        def keep(module: nn.Module, positional: tuple, named: dict[str, Any], outputs: Any) -> None:
            if torch.is_grad_enabled():
                mask, heads = named.get("attention_mask"), 0.0
                if config.router_type != "threshold":
                    top_k, score = [router.top_k for router in module.routers], config.router_score
                    heads = load_balancing_loss(outputs.router_logits, top_k, mask, router_score=score)
                experts = expert_balancing_loss(outputs.expert_logits, config, mask)
                losses.append(config.head_balance_coef * heads + config.expert_balance_coef * experts)

        config = backbone.config
        if config.router_type == "threshold" and not config.num_local_experts:
            return super().compute_loss(model, inputs, *args, **kwargs)
        hooks = [
            backbone.register_forward_pre_hook(ask, with_kwargs=True),
            backbone.register_forward_hook(keep, with_kwargs=True),
        ]
        try:
            result = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        if not losses:
            return result
        balance = torch.stack(losses).mean()
        if self.model.training and self._scales_for_accumulation(kwargs.get("num_items_in_batch")):
            balance = balance / self.current_gradient_accumulation_steps
        if isinstance(result, tuple):
            return result[0] + balance.to(result[0].device), *result[1:]
        return result + balance.to(result.device)

    def _scales_for_accumulation(self: Any, num_items_in_batch: Any) -> bool:
        """Whether `Trainer.training_step` takes the loss as scaled for gradient accumulation, by its own rule."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = self.compute_loss_func is not None
            scaled = scaled or (self.model_accepts_loss_kwargs and num_items_in_batch is not None)
        return scaled


def find_backbone(model: nn.Module) -> nn.Module:
    """The MoH backbone in a model that may be wrapped (PEFT, DDP), of this package or of remote code."""
    for module in model.modules():
        if type(module).__name__.endswith("MoHLlamaModel"):  # FSDP2 puts its name before
            if module.config.output_router_logits:
                raise UserError("output_router_logits=True adds the load-balance loss already; set it to False")
            return module
    raise UserError(f"{type(model).__name__} holds no MoH model; leave out HeadBalanceMixin")
