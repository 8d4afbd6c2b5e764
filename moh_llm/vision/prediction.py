"""What models of images predict, and the noise that DiTs are trained on.

Shapes: B images, T tokens, C channels, H x W pixels, U routed heads of a layer.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIMESTEPS = 1000  # of DiT's diffusion


def is_denoiser(network: nn.Module) -> bool:
    """Whether a network is a DiT."""
    return hasattr(network, "transformer_blocks")


def predict(network: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A network's output on its arguments, and the router logits of its layers, if any, `[B, T, U]` each.

    Outputs are the logits of a classifier `[B, classes]`, hidden states of a backbone, or a DiT's `[B, C, H, W]`.
    """
    logits: list[Tensor] = []
    given: dict[str, Any] = {"router_logits": logits} if hasattr(network, "routers") else {}
    if is_denoiser(network):
        return network(**batch, cross_attention_kwargs=given or None).sample, logits
    output = network(**batch, **given)
    return output["logits" if "logits" in output else "last_hidden_state"], logits


def kept_variance() -> Tensor:
    """Share of an image's variance that is left after each step of DiT's linear schedule, float64 `[1000]`."""
    return (1 - torch.linspace(1e-4, 0.02, TIMESTEPS, dtype=torch.float64)).cumprod(0)


def add_noise(images: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
    """Images `[B, C, H, W]` after ``timestep`` `[B]` steps (Ho et al., 2020)."""
    kept = kept_variance()[timestep].to(images)[:, None, None, None]
    return kept.sqrt() * images + (1 - kept).sqrt() * noise


def denoising_loss(output: Tensor, images: Tensor, noise: Tensor, noised: Tensor, timestep: Tensor) -> Tensor:
    """Squared error to the noise, plus the variational term of a variance that is learned (Nichol and Dhariwal, 2021).

    ``output`` has the C channels of the predicted noise or also those of the variance, v: its logarithm lies between
    that of the posterior (v = -1) and log beta (v = 1). The term is the KL of the step's posterior to the prediction in
    bits per value, with the mean held fixed. Step 0 has the posterior variance of step 1, as in DiT's code; its term is
    the same KL and not the likelihood of 256 levels, which latents do not have.
    """
    mean, *variance = output.split(images.shape[1], 1)
    error = F.mse_loss(mean, noise)
    if not variance:
        return error
    kept = kept_variance()
    before = F.pad(kept[:-1], (1, 0), value=1.0)
    betas = 1 - kept / before
    posterior = betas * (1 - before) / (1 - kept)
    posterior[0] = posterior[1]
    schedule = (betas, kept, before, posterior)
    beta, kept, before, posterior = (of[timestep.cpu()].to(error)[:, None, None, None] for of in schedule)
    # Both means share the term in the noised image: they differ by the error of the image that they predict.
    predicted = (noised - (1 - kept).sqrt() * mean.detach()) / kept.sqrt()
    difference = before.sqrt() * beta / (1 - kept) * (images - predicted)
    logarithm = torch.lerp(posterior.log(), beta.log(), (variance[0] + 1) / 2)
    ratio = posterior.log() - logarithm
    bits = 0.5 * (ratio.exp() - 1 - ratio + difference**2 * (-logarithm).exp()) / math.log(2)
    return error + bits.mean()
