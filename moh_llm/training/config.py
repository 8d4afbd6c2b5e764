"""The keys of a training recipe: a few frozen dataclasses, each key with its meaning and unit.

A value that cannot be used raises `UserError` when the dataclass is made; the message names the
key, the value, the rule and the way out. `moh_llm.training.recipe` fills these from YAML and the
command line, and prints the meanings below as help.
"""

import math
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from moh_llm.errors import UserError
from moh_llm.reading import check_path


def key(meaning: str, default: Any = MISSING) -> Any:
    """A recipe key: a dataclass field that carries its meaning for ``--help``."""
    return field(default=default, metadata={"meaning": meaning})


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it per optimiser step."""

    mixture: str = key(
        "data mixture: a YAML file or 'embedded', tokenised on the way; or a folder that moh-llm tokenize made",
        "embedded",
    )
    sequence_length: int = key("tokens per sequence (sequence)", 512)
    batch_size: int = key("sequences per optimiser step, in all", 4)
    micro_batch_size: int = key("sequences per micro-batch; the rest of the step is accumulated", 1)
    dataloader_num_workers: int = key("processes that read ahead; 0: sequences are read when they are needed", 0)

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 2, f"data.sequence_length={self.sequence_length} must be at least 2 tokens")
        for name in ("batch_size", "micro_batch_size"):
            value = getattr(self, name)
            _require(value >= 1, f"data.{name}={value} must be at least 1 sequence")
        _require(
            self.dataloader_num_workers >= 0,
            f"data.dataloader_num_workers={self.dataloader_num_workers} must not be negative",
        )
        _require(
            self.batch_size % self.micro_batch_size == 0,
            f"data.batch_size={self.batch_size} must be a multiple of data.micro_batch_size={self.micro_batch_size}",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. Weight decay acts on matrices only."""

    learning_rate: float = key("highest learning rate", 5e-5)
    router_learning_rate: float | None = key("highest learning rate of the routers; null: learning_rate", 1e-3)
    weight_decay: float = key("decoupled weight decay of matrices", 0.1)
    betas: tuple[float, float] = key("decay rates of AdamW's two moments", (0.9, 0.95))
    epsilon: float = key("AdamW's epsilon", 1e-8)
    max_grad_norm: float | None = key("gradients are clipped to this l2 norm; null: not clipped", 1.0)

    def __post_init__(self) -> None:
        for name in ("learning_rate", "router_learning_rate", "epsilon", "max_grad_norm"):
            value = getattr(self, name)
            _require(value is None or 0 < value < math.inf, f"optimizer.{name}={value} must be above 0")
        decay = self.weight_decay
        _require(0 <= decay < math.inf, f"optimizer.weight_decay={decay} must be a finite number, not negative")
        _require(
            all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas={list(self.betas)} must both lie in [0, 1)",
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then cosine; the routers' rate follows the same curve, scaled."""

    warmup_steps: int = key("steps of linear warm-up", 2)
    start_learning_rate: float = key("learning rate of the first warm-up step", 1e-5)
    final_learning_rate: float = key("learning rate of the last step", 5e-6)
    anneal_steps: int = key("steps over which active heads fall from all of them to the model's number; 0: at once", 0)

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "anneal_steps"):
            _require(getattr(self, name) >= 0, f"schedule.{name}={getattr(self, name)} must not be negative")
        for name in ("start_learning_rate", "final_learning_rate"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"schedule.{name}={value} must not be negative")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised: the task's loss + balance_coefficient * load-balance loss (Eq. 8)."""

    kind: Literal["distillation", "cross_entropy"] = key(
        "distillation: KL to the base's next-token distribution; cross_entropy: to the text", "distillation"
    )
    temperature: float = key("softmax temperature of both sides of the KL", 1.0)
    balance_coefficient: float | None = key(
        "weight beta of the load-balance loss; null: the model's router_aux_loss_coef", None
    )
    layer_coefficient: float = key(
        "distillation: weight of the layers' squared distance to the base's, relative to their size; 0: none", 0.0
    )

    def __post_init__(self) -> None:
        _require(0 < self.temperature < math.inf, f"objective.temperature={self.temperature} must be above 0")
        beta = self.balance_coefficient
        _require(beta is None or 0 <= beta < math.inf, f"objective.balance_coefficient={beta} must not be negative")
        layer = self.layer_coefficient
        _require(0 <= layer < math.inf, f"objective.layer_coefficient={layer} must not be negative")
        _require(
            layer == 0 or self.kind == "distillation",
            f"objective.layer_coefficient={layer} needs the base to compare with: set objective.kind to distillation",
        )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the named projections; routers are trained in full beside them."""

    rank: int = key("rank of the adapters", 16)
    alpha: float = key("an adapter's output is scaled by alpha / rank", 32.0)
    dropout: float = key("dropout on the adapters' input", 0.0)
    target_modules: tuple[str, ...] = key(
        "names of the linear layers that get an adapter",
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )

    def __post_init__(self) -> None:
        _require(self.rank >= 1, f"lora.rank={self.rank} must be at least 1")
        _require(0 < self.alpha < math.inf, f"lora.alpha={self.alpha} must be above 0")
        _require(0 <= self.dropout < 1, f"lora.dropout={self.dropout} must lie in [0, 1)")
        _require(len(self.target_modules) > 0, "lora.target_modules is empty; name at least one, for example q_proj")


@dataclass(frozen=True)
class EvaluationConfig:
    """Scoring on the mixture's held-out text."""

    eval_steps: int = key("score before the first step and every this many steps; 0: only the saved model", 10)
    max_tokens: int = key("held-out tokens to score", 8192)
    batch_size: int = key("sequences per forward pass", 2)

    def __post_init__(self) -> None:
        _require(self.eval_steps >= 0, f"evaluation.eval_steps={self.eval_steps} must not be negative")
        _require(self.max_tokens >= 1, f"evaluation.max_tokens={self.max_tokens} must be at least 1")
        _require(self.batch_size >= 1, f"evaluation.batch_size={self.batch_size} must be at least 1 sequence")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints to resume from; one is always written after the last step."""

    save_steps: int = key("steps between checkpoints", 10)
    save_total_limit: int = key("checkpoints that are kept; older ones are removed", 2)
    milestone_every: int = key("a checkpoint after a multiple of this many steps is kept for good; 0: none is", 0)

    def __post_init__(self) -> None:
        _require(self.save_steps >= 1, f"checkpoint.save_steps={self.save_steps} must be at least 1 step")
        _require(self.milestone_every >= 0, f"checkpoint.milestone_every={self.milestone_every} must not be negative")
        _require(
            self.milestone_every % self.save_steps == 0,
            f"checkpoint.milestone_every={self.milestone_every} must be a multiple of "
            f"checkpoint.save_steps={self.save_steps}",
        )
        _require(self.save_total_limit >= 1, f"checkpoint.save_total_limit={self.save_total_limit} must be at least 1")


@dataclass(frozen=True)
class DivergenceConfig:
    """What is done about a step whose loss or gradient is not finite, or whose loss jumps."""

    action: Literal["stop", "skip", "roll_back"] = key(
        "stop: end the run; skip: drop the step; roll_back: also go back to the last checkpoint's weights", "stop"
    )
    spike_factor: float | None = key(
        "a loss above this times the median of recent steps is a spike; null: only what is not finite counts", None
    )
    window: int = key("recent steps that the median is taken of; there are no spikes before there are as many", 50)
    most_in_a_row: int = key("end the run after this many steps in a row were dropped", 5)

    def __post_init__(self) -> None:
        factor = self.spike_factor
        _require(factor is None or 1 < factor < math.inf, f"divergence.spike_factor={factor} must be above 1")
        for name in ("window", "most_in_a_row"):
            _require(getattr(self, name) >= 1, f"divergence.{name}={getattr(self, name)} must be at least 1 step")


@dataclass(frozen=True)
class HubConfig:
    """Publishing what the run makes, as `moh-llm publish` does."""

    repo_id: str = key("repository that gets the tuned model, ORG/NAME (required)", "")
    private: bool = key("make the repository private", False)
    licence: str | None = key("the Hub's id of the licence; null: the base's", None)
    milestones: bool = key("publish the model of each milestone, too, to a branch such as step-000100", False)

    def __post_init__(self) -> None:
        _require("/" in self.repo_id, f"hub.repo_id={self.repo_id} must name a repository on the Hub, ORG/NAME")


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: str = key("folder of a converted model (required)")
    output_dir: str = key("folder of the run: model/, checkpoints/, log.jsonl, run.json (required)")
    max_steps: int = key("optimiser steps (required)")
    base: str | None = key(
        "folder or Hub id of the checkpoint that the model was converted from; null: where the conversion found it",
        None,
    )
    seed: int = key("seed of data order, adapters and dropout", 0)
    mixed_precision: Literal["no", "bf16"] = key("bf16: forward and backward in bfloat16; weights stay float32", "no")
    gradient_checkpointing: bool = key("recompute activations in the backward pass to save memory", False)
    attn_implementation: Literal["sdpa", "moh_sparse"] = key(
        "sdpa: all heads are computed, then gated; moh_sparse: Triton kernels that skip heads that are off (CUDA only)",
        "sdpa",
    )
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        "dtype of the saved weights; null: that of the model folder", None
    )
    data: DataConfig = field(default_factory=DataConfig, metadata={"meaning": "what is read"})
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig, metadata={"meaning": "AdamW"})
    schedule: ScheduleConfig = field(
        default_factory=ScheduleConfig, metadata={"meaning": "learning rate over the steps"}
    )
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig, metadata={"meaning": "what is minimised"})
    lora: LoraConfig | None = field(
        default=None, metadata={"meaning": "low-rank adapters; null: every weight is trained"}
    )
    evaluation: EvaluationConfig = field(
        default_factory=EvaluationConfig, metadata={"meaning": "scores on held-out text"}
    )
    checkpoint: CheckpointConfig = field(
        default_factory=CheckpointConfig, metadata={"meaning": "checkpoints to resume from"}
    )
    divergence: DivergenceConfig = field(
        default_factory=DivergenceConfig, metadata={"meaning": "what is done when the loss is not finite or jumps"}
    )
    hub: HubConfig | None = field(default=None, metadata={"meaning": "what is published on the Hub; null: nothing is"})
    report_to: tuple[str, ...] = key(
        "where curves go beside log.jsonl: tensorboard, wandb, trackio, or another that accelerate knows",
        ("tensorboard",),
    )

    def __post_init__(self) -> None:
        _require(self.model != "", "model is empty; name the folder of a converted model")
        _require(self.output_dir != "", "output_dir is empty; name a folder for the run")
        _require(self.base != "", "base is empty; name the checkpoint that the model was converted from, or null")
        for name in ("model", "output_dir", "base"):
            check_path(getattr(self, name) or "", name)
        check_path(self.data.mixture, "data.mixture")
        _require(self.max_steps >= 1, f"max_steps={self.max_steps} must be at least 1")
        _require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2**32)")
        _require(
            self.schedule.warmup_steps <= self.max_steps,
            f"schedule.warmup_steps={self.schedule.warmup_steps} must not exceed max_steps={self.max_steps}; "
            "lower it or train longer",
        )
        _require(
            self.schedule.anneal_steps <= self.max_steps,
            f"schedule.anneal_steps={self.schedule.anneal_steps} must not exceed max_steps={self.max_steps}; "
            "the run would end with more heads than the model has",
        )
        for name in ("start_learning_rate", "final_learning_rate"):
            value = getattr(self.schedule, name)
            _require(
                value <= self.optimizer.learning_rate,
                f"schedule.{name}={value} must not exceed optimizer.learning_rate={self.optimizer.learning_rate}; "
                "lower it too",
            )

        _require(
            self.hub is None or not self.hub.milestones or self.checkpoint.milestone_every > 0,
            "hub.milestones=true needs milestones: set checkpoint.milestone_every to the steps between them",
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step reads."""
        return self.data.batch_size * self.data.sequence_length


# Keys (or groups) whose change leaves every number of the training curve as it was: where things
# are written, what is only looked at, and recomputation, which repeats the same operations. `model`
# and the mixture are here because the run record holds hashes of what they name, which are compared; so does `base`,
# whose place may change and whose weights may not.
_HARMLESS = {"model", "output_dir", "base", "save_dtype", "gradient_checkpointing", "checkpoint", "hub", "report_to"}
_HARMLESS |= {
    "attn_implementation",
    "evaluation.eval_steps",
    "evaluation.batch_size",
    "data.mixture",
    "data.dataloader_num_workers",
}


def changed_keys(recorded: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys that differ between two recipes (nested dicts) and change the training curve."""
    changed = []
    for name in sorted(recorded.keys() | current.keys()):
        old, new = recorded.get(name), current.get(name)
        if prefix + name in _HARMLESS or old == new:
            continue
        nested = isinstance(old, dict) and isinstance(new, dict)
        changed += changed_keys(old, new, f"{prefix}{name}.") if nested else [prefix + name]
    return changed
