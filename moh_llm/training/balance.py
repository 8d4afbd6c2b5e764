"""What routers need in trainers that compute their own loss, as TRL's do: load balance, or the budget of keys."""

import math
from typing import Any

import torch
from torch import nn

from moh_llm.errors import UserError
from moh_llm.flops import distant_keys
from moh_llm.modeling.modeling_moh_llama import expert_balancing_loss
from moh_llm.modeling.routing_moh import load_balancing_loss
from moh_llm.modeling.seen_moh import Seen
from moh_llm.training.budget import KeyBudget, distant_keys_read, learns_thresholds, planned_share


class HeadBalanceMixin:
    """Adds to the loss of a `transformers.Trainer` what routers need: load balance, or the budget of keys.

    For any trainer, also one that does not call the model's own loss:

        class MoHSFTTrainer(HeadBalanceMixin, SFTTrainer): ...

    Top-K routers get the load-balance loss (Eq. 7), and experts theirs, weighted by the config's ``head_balance_coef``
    and ``expert_balance_coef``. They are the mean over the forward passes that `compute_loss` makes with gradients,
    which leaves out a reference model's. Micro-batches of a step have the same weight.

    Threshold routers that are trained get the budget of `moh_llm.training.budget`: `planned_share`. R is exact
    without gradient accumulation. With it, a micro-batch takes the mean of the micro-batches so far for the distant
    keys of those to come. Checkpoints hold the multiplier, which is the same on all processes of DDP.

    Raises:
        UserError: the model is not a MoH model, or its config adds the load-balance loss itself.
    """

    _backbone: nn.Module | None = None  # of the budget
    _budget: KeyBudget | None = None

    def compute_loss(self: Any, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of the trainer's own `compute_loss` with the loss of the routers added."""
        backbone = find_backbone(model)
        config, budget = backbone.config, self._budget_of(backbone)
        losses: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        seen: list[Seen] = []

        def ask(module: nn.Module, positional: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            named |= zip(("input_ids", "attention_mask", "position_ids"), positional, strict=False)
            asked = dict.fromkeys(("output_router_logits", "output_expert_logits"), torch.is_grad_enabled())
            return (), named | asked

        def keep(module: nn.Module, positional: tuple, named: dict[str, Any], outputs: Any) -> None:
            if torch.is_grad_enabled():
                mask, logits = named.get("attention_mask"), outputs.router_logits
                heads = logits[0].new_zeros(())
                if config.router_type != "threshold" and any(router.is_trained for router in module.routers):
                    top_k, score = [router.top_k for router in module.routers], config.router_score
                    heads = load_balancing_loss(logits, top_k, mask, router_score=score)
                experts = expert_balancing_loss(outputs.expert_logits, config, mask)
                losses.append(config.head_balance_coef * heads + config.expert_balance_coef * experts)
                if budget is not None:
                    places = (seen[-1].last - seen[-1].start)[..., 0].expand(logits[0].shape[:2])  # in the documents
                    is_padded = mask is not None and mask.dim() == 2
                    shown = mask[:, -places.shape[1] :] != 0 if is_padded else torch.ones_like(places)
                    distant = distant_keys(config, places) * shown
                    read, slope = distant_keys_read(logits, module.routers, distant)
                    keys.append(torch.stack([read, slope, distant.sum(), ((places + 1) * shown).sum()]))

        if config.router_type == "threshold" and budget is None and not config.num_local_experts:
            return super().compute_loss(model, inputs, *args, **kwargs)
        first = backbone.layers[0]
        with (
            backbone.register_forward_pre_hook(ask, with_kwargs=True),
            first.register_forward_pre_hook(lambda module, _, named: seen.append(named["seen"]), with_kwargs=True),
            backbone.register_forward_hook(keep, with_kwargs=True),
        ):
            result = super().compute_loss(model, inputs, *args, **kwargs)
        if not losses:
            return result
        balance = torch.stack(losses).mean()
        if budget is not None:
            balance = balance + self._loss_of_keys(torch.stack(keys).sum(0)).to(balance.device)
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

    def _budget_of(self: Any, backbone: nn.Module) -> KeyBudget | None:
        if not learns_thresholds(backbone):
            return None
        if self._backbone is not backbone:
            self._budget = KeyBudget(backbone, self.accelerator.device, planned_share(backbone.config))
            self._backbone, self._sums = backbone, []
        # A resumed run has the state of its checkpoint, and another run a new one.
        self._budget.multiplier, self._budget.average = self.state.stateful_callbacks.get("KeyBudget", (0.0, 0.0))
        return self._budget

    def _loss_of_keys(self: Any, keys: torch.Tensor) -> torch.Tensor:
        """The multiplier times a micro-batch's part of R, times the number of micro-batches."""
        self._sums.append(keys.detach().to(self.accelerator.device, copy=True))
        distant = torch.stack(self._sums)[:, 2].mean()
        read, slope = keys[:2] / self.accelerator.reduce(distant, "mean").clamp_min(1)
        self._sums[-1][1] = slope.detach()
        return self._budget.multiplier * read

    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the trainer's own `training_step`; after the last of a step choose the multiplier of the next one."""
        loss, budget = super().training_step(*args, **kwargs), self._budget
        if budget is not None and self._sums and self.accelerator.sync_gradients:
            sums = torch.stack([*torch.stack(self._sums).sum(0), budget.take_gradient()])
            read, slope, distant, keys, budget.slope = self.accelerator.reduce(sums, "mean").tolist()
            near, read = 1 - distant / keys, read / max(1.0, distant)
            self._logged = {"keys_read": near + (1 - near) * read, "keys_asked": near + (1 - near) * budget.target}
            self._logged["keys_multiplier"] = budget.multiplier
            if self.accelerator.scaler is not None:
                budget.slope /= self.accelerator.scaler.get_scale()
            if math.isfinite(budget.slope):
                budget.update(read, slope / len(self._sums))
                self.state.stateful_callbacks["KeyBudget"] = [budget.multiplier, budget.average]
            self._sums = []
        return loss

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with the loss the keys that the last step read and was asked to, of all keys, and their multiplier."""
        super().log(logs | self._logged if "loss" in logs and self._budget is not None else logs, *args, **kwargs)


def find_backbone(model: nn.Module) -> nn.Module:
    """The MoH backbone in a model that may be wrapped (PEFT, DDP), of this package or of remote code."""
    for module in model.modules():
        if type(module).__name__.endswith("MoHLlamaModel"):  # FSDP2 puts its name before
            if module.config.output_router_logits:
                raise UserError("output_router_logits=True adds the load-balance loss already; set it to False")
            return module
    raise UserError(f"{type(model).__name__} holds no MoH model; leave out HeadBalanceMixin")
