"""The methods that `rivals.py` compares: how each is fitted to calibration text, and the models that this makes."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from baselines.oracle import by_oracle
from baselines.routers import RandomRouter, RouterFitter, TopKLabelRouter
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from moh_llm.conversion.budget import plan_layers, routing_tensors
from moh_llm.conversion.calibrate import LayerCalibration, make_fitter
from moh_llm.conversion.fit import LayerFitter, LayerSample, RoutingFit
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.plan import PlanOptions, build_config, drops_to_fit, shared_and_active
from moh_llm.conversion.sweeps import layer_samples
from moh_llm.errors import UserError
from moh_llm.metrics import Batch, LogitsOf, logits_of
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHRouter

ROUTERS = {kind.__name__: kind for kind in (MoHRouter, RandomRouter, TopKLabelRouter)}
NAMES = (
    "ours", "ours, no fallback", "ours, even budgets", "ours, neither", "fixed heads", "random heads", "paper's layer",
    "paper's router, fallback", "paper's router, budgets", "paper's router, both", "MLP on Top-K labels",
    "MLP on Top-K labels, both", "oracle",
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A plan of a conversion, and the class of a router that takes the place of the plan's."""

    plan: PlanOptions
    router: type[MoHRouter] | None = None

    @property
    def fitter(self) -> "Method":
        """What methods have in common that one fitter of a layer serves."""
        if self.router is TopKLabelRouter:  # labels depend on the budget
            return dataclasses.replace(self, plan=dataclasses.replace(self.plan, budgets=None))
        plan = dataclasses.replace(self.plan, budgets=None, num_active_heads=None, active_ratio=None)
        return dataclasses.replace(self, plan=plan)


def methods_at(active: float, heads: int) -> dict[str, Method]:
    """All methods but the oracle at a mean of `active` of `heads` heads."""
    even, bare = {"budgets": "even"}, {"fallback": "none"}

    def plan(**fields: Any) -> PlanOptions:
        budget = {"num_active_heads": active} if isinstance(active, int) else {"active_ratio": active / heads}
        return PlanOptions(**budget, **fields)

    paper, none = {"num_shared_heads": min(int(active), heads // 2)}, {"num_shared_heads": 0}
    return {
        "ours": Method(plan()),
        "ours, no fallback": Method(plan(**bare)),
        "ours, even budgets": Method(plan(**even)),
        "ours, neither": Method(plan(**even, **bare)),
        "fixed heads": Method(plan(router="none")),
        "random heads": Method(plan(), RandomRouter),
        "paper's layer": Method(plan(**paper, **even, **bare), MoHRouter),
        "paper's router, fallback": Method(plan(**paper, **even), MoHRouter),
        "paper's router, budgets": Method(plan(**paper, **bare), MoHRouter),
        "paper's router, both": Method(plan(**paper), MoHRouter),
        "MLP on Top-K labels": Method(plan(**none, **even, **bare), TopKLabelRouter),
        "MLP on Top-K labels, both": Method(plan(**none), TopKLabelRouter),
    }


def fit_methods(
    dense: LayerwiseModel,
    batches: Sequence[Batch],
    names: Sequence[str],
    budgets: Sequence[float],
    scratch: Path,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Config, router's class and tensors of each method at each budget, by label; `scratch` holds hidden states.

    Raises:
        UserError: a method that has as many heads on in all layers, or learns to choose a number of them, gets a
            fraction.
    """
    wanted = {*names} | ({"ours"} if "oracle" in names else set())
    methods = {
        label_of(name, budget): method
        for budget in budgets
        for name, method in methods_at(budget, dense.config.num_attention_heads).items()
        if name in wanted
    }
    for label, method in methods.items():
        if method.plan.active_ratio and (method.plan.budgets == "even" or method.router is TopKLabelRouter):
            raise UserError(f"{label}: this method needs a whole number of heads; leave it out with --methods")
    layers: dict[str, list[LayerCalibration]] = {label: [] for label in methods}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        samples = layer_samples(dense, batches, (), 1, Path(folder), seed)
        for number, (sample, _) in zip(reversed(range(len(dense))), samples, strict=True):
            for label, layer in fit_layer(methods, dense, number, sample).items():
                layers[label].insert(0, layer)
    found = {}
    for label, method in methods.items():
        config, fits = plan_layers(method.plan, dense.config, layers[label])
        if method.router:
            config.router_type = "query_norm"  # the router of the modelling code that has no weights
        router = method.router.__name__ if method.router else None
        found[label] = {"config": config.to_dict(), "router": router, "tensors": routing_tensors(fits)}
    return found


def fit_layer(
    methods: dict[str, Method], dense: LayerwiseModel, number: int, sample: LayerSample
) -> dict[str, LayerCalibration]:
    """One layer of each method."""
    attention = dense.layer(number).layers[0].self_attn
    queries = attention.q_proj(sample.inputs.to(dense.dtype)).unflatten(-1, (-1, attention.head_dim))
    queries = getattr(attention, "q_norm", torch.nn.Identity())(queries).float()
    fitters: dict[Method, LayerFitter] = {}
    fits: dict[tuple[Method, int], RoutingFit] = {}
    trained: dict[int, TopKLabelRouter] = {}
    layers = {}
    for label, method in methods.items():
        alike, plan = method.fitter, method.plan
        if alike not in fitters:
            fitters[alike] = open_fitter(method, dense.config, number, sample, queries, trained)
        for dropped in (drops := drops_to_fit(plan, dense.config)):
            if (alike, dropped) not in fits:
                fits[alike, dropped] = fitters[alike].fit(dropped)
        fitter, own = fitters[alike], {dropped: fits[alike, dropped] for dropped in drops}
        layers[label] = LayerCalibration(fitter.shared_heads, fitter.importance, own)
    return layers


def open_fitter(
    method: Method,
    base: PreTrainedConfig,
    number: int,
    sample: LayerSample,
    queries: torch.Tensor,
    trained: dict[int, TopKLabelRouter],
) -> LayerFitter:
    """What fits a layer by that method.

    Args:
        method, base, number, sample: the method, the base's config, the layer and its sample.
        queries: those before rotary embedding, `[N, H, D]`.
        trained: the layer's routers that are trained so far, by number of active heads; one is added where it lacks.
    """
    plan = method.plan
    if method.router is None:
        fitter = make_fitter(plan, base, sample)
        assert isinstance(fitter, LayerFitter)
        return fitter
    shared, layers = shared_and_active(plan, base)[0], base.num_hidden_layers
    config = build_config(base, plan, [list(range(shared))] * layers, [max(1, shared)] * layers)
    config.router_type = "query_norm"
    router, active = method.router(config, number).to(sample.inputs.device), plan.num_active_heads or 0
    if isinstance(router, TopKLabelRouter):
        if active not in trained:
            router.train_on(sample, active)
        router = trained.setdefault(active, router)
    return RouterFitter(sample, router, queries, plan.head_fallback == "value")


def save_fits(fits: dict[str, dict[str, Any]], path: Path) -> None:
    """Write them in one step, as safetensors; methods that share a fit each have it."""
    tensors = {
        f"{label}:{name}": tensor.clone() for label, fit in fits.items() for name, tensor in fit["tensors"].items()
    }
    methods = {label: {"config": fit["config"], "router": fit["router"]} for label, fit in fits.items()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"methods": json.dumps(methods)})
    temporary.replace(path)


def read_fits(path: Path) -> dict[str, dict[str, Any]]:
    """What `save_fits` has written."""
    with safe_open(path, framework="pt") as file:
        fits = {label: fit | {"tensors": {}} for label, fit in json.loads(file.metadata()["methods"]).items()}
        for key in file.keys():  # noqa: SIM118 (not a dict)
            label, name = key.split(":", 1)
            fits[label]["tensors"][name] = file.get_tensor(key)
    return fits


def open_candidates(dense: PreTrainedModel, path: Path, names: Sequence[str]) -> dict[str, LogitsOf]:
    """The models by label; all share the weights of `dense`."""
    candidates = {}
    for label, stored in read_fits(path).items():
        name, budget = label.split("/")
        config = MoHLlamaConfig(**{key: value for key, value in stored["config"].items() if key != "model_type"})
        with init_empty_weights(include_buffers=False):
            model = MoHLlamaForCausalLM(config)
            for layer_number, layer in enumerate(model.model.layers if stored["router"] else ()):
                layer.self_attn.router = ROUTERS[stored["router"]](config, layer_number)
        # As convert.py writes them; other methods' routers compute in float32.
        routing = {
            key: tensor if stored["router"] and ".router." in key else tensor.to(dense.dtype)
            for key, tensor in stored["tensors"].items()
        }
        model.load_state_dict(dense.state_dict() | routing, assign=True)
        model.to(dense.device).eval()
        if name in names:
            candidates[label] = logits_of(model)
        if name == "ours" and "oracle" in names:
            candidates[label_of("oracle", budget)] = by_oracle(model)
    return candidates


def label_of(name: str, budget: float | str) -> str:
    """The key of a method at a budget."""
    return f"{name}/{budget}"
