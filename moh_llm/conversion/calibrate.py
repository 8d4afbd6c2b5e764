"""Calibration: each layer is fitted to the statistics of two sweeps over the base (see `sweeps.py` and `fit.py`)."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transformers import PreTrainedConfig

from moh_llm.conversion.fit import LayerFitter, LayerSample, RoutingFit
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.local_fit import LocalFitter
from moh_llm.conversion.plan import PlanOptions, drops_to_fit, shared_and_active
from moh_llm.conversion.sweeps import layer_samples
from moh_llm.metrics import Batch


@dataclass(frozen=True)
class LayerCalibration:
    """Result of the calibration of one layer.

    Attributes:
        shared_heads: ids of the shared heads.
        importance: per group, the estimated KL (nats per token) of always dropping it alone.
        fits: number of dropped heads -> router and fallbacks; empty where nothing is fitted.
        group_size: heads per group; a token drops all heads of a group or none.
    """

    shared_heads: list[int]
    importance: list[float]
    fits: dict[int, RoutingFit]
    group_size: int = 1

    @property
    def costs(self) -> dict[int, float]:
        """Number of heads that may be dropped -> estimated KL, in nats per token; interpolated between the fits."""
        known = {0: 0.0} | {dropped: fit.cost for dropped, fit in sorted(self.fits.items())}
        costs = {}
        for (low, a), (high, b) in pairwise(known.items()):
            costs |= {
                n: a + (b - a) * (n - low) / (high - low)
                for n in range(low + self.group_size, high + 1, self.group_size)
            }
        return costs

    def fit_for(self, dropped: int) -> RoutingFit:
        """The fit for that number of dropped heads, or the nearest one below it."""
        return self.fits[max((n for n in self.fits if n <= dropped), default=min(self.fits))]


def make_fitter(plan: PlanOptions, config: PreTrainedConfig, sample: LayerSample) -> LayerFitter | LocalFitter:
    """What fits a layer for that plan, with any number of dropped heads."""
    shared, group_size = shared_and_active(plan, config)[0], plan.heads_per_group(config)
    chosen = shared if plan.shared == "importance" else list(range(shared))
    if plan.head_fallback == "local":
        return LocalFitter(sample, plan.router_type, None if plan.mixes else chosen, group_size)
    return LayerFitter(sample, chosen, plan.head_fallback == "value", group_size, plan.router_type != "none")


def calibrate(
    base: LayerwiseModel,
    batches: Sequence[Batch],
    plans: Sequence[PlanOptions],
    scratch: Path,
    seed: int = 0,
    make: Callable[[PlanOptions, PreTrainedConfig, LayerSample], LayerFitter | LocalFitter] = make_fitter,
) -> list[list[LayerCalibration]]:
    """Fit every layer of a dense base on batches of `input_ids` and `position_ids` `[B, T]`.

    Args:
        base: the dense model, layer by layer.
        batches: calibration text.
        plans: which heads are shared, and what is fitted for which numbers of dropped heads.
        scratch: a folder for the hidden states: tokens x hidden size x layers numbers.
        seed: draws the labels y.
        make: what fits a layer.

    Returns:
        Of each plan its layers. Where plans have local fallbacks, documents' first tokens, up to the most that have all
        heads on, are left out of all fits.
    """
    windows = {seen for plan in plans if (seen := in_sight(plan))}
    skipped = max((plan.all_heads_until for plan in plans if in_sight(plan)), default=1)
    found: list[list[LayerCalibration]] = [[] for _ in plans]
    for sample, local in layer_samples(base, batches, windows, skipped, scratch, seed):
        fitters: dict[PlanOptions, LayerFitter | LocalFitter] = {}
        fits: dict[tuple[PlanOptions, int], RoutingFit] = {}
        for plan, layers in zip(plans, found, strict=True):
            alike = dataclasses.replace(plan, num_active_heads=None, keys=None)
            if alike not in fitters:
                sample.local = local.get(in_sight(plan))
                fitters[alike] = make(plan, base.config, sample)
            fitter, group_size = fitters[alike], plan.heads_per_group(base.config)
            drops = drops_to_fit(plan, base.config)
            for dropped in drops:
                if (alike, dropped) not in fits:
                    fits[alike, dropped] = fitter.fit(dropped)
            shared = fitter.shared_heads if isinstance(fitter, LayerFitter) else []
            own = {dropped: fits[alike, dropped] for dropped in drops}
            layers.append(LayerCalibration(shared, fitter.importance, own, group_size))
    return [layers[::-1] for layers in found]


def in_sight(plan: PlanOptions) -> tuple[int, int] | None:
    """Window and sinks of a plan's local fallbacks."""
    return (plan.window, plan.local_sinks) if plan.head_fallback == "local" else None
