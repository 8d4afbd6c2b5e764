"""The keys of a training recipe: a few frozen dataclasses, each key with its meaning and unit.

A value that cannot be used raises `UserError` when the dataclass is made; the message names the
key, the value, and the rule. `moh_llm.training.recipe` fills these from YAML and the
command line, and prints the meanings below as help.
"""

from dataclasses import dataclass
from typing import Literal

from moh_llm.reading import check_path, expand_home
from moh_llm.training.keys import Keys, key, require

Attention = Literal["sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
GateGradient = Literal["exact", "sampled", "none"]


@dataclass(frozen=True)
class DataConfig(Keys, group="data"):
    """Text, and amount of it per optimiser step."""

    mixture: str = key(
        "data mixture: a YAML file or 'embedded', tokenised on the way; or a folder that moh-llm tokenize made",
        "embedded",
    )
    sequence_length: int = key("tokens per sequence", 512, at_least=2)
    batch_size: int = key("sequences per optimiser step, in all", 4, at_least=1)
    micro_batch_size: int = key(
        "sequences per forward pass, in scoring, too; the rest of a step is accumulated", 1, at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mixture", expand_home(self.mixture))
        require(
            self.batch_size % self.micro_batch_size == 0,
            f"data.batch_size={self.batch_size} must be a multiple of data.micro_batch_size={self.micro_batch_size}",
        )


@dataclass(frozen=True)
class OptimizerConfig(Keys, group="optimizer"):
    """AdamW. Weight decay acts on matrices only."""

    learning_rate: float = key("highest learning rate", 5e-5, above=0)
    router_learning_rate: float | None = key("highest learning rate of the routers; null: learning_rate", 1e-3, above=0)
    weight_decay: float = key("decoupled weight decay of matrices", 0.1, at_least=0)
    betas: tuple[float, float] = key("decay rates of AdamW's two moments", (0.9, 0.95))
    max_grad_norm: float | None = key("gradients are clipped to this l2 norm; null: not clipped", 1.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = all(0 <= beta < 1 for beta in self.betas)
        require(holds, f"optimizer.betas={list(self.betas)} must both lie in [0, 1)")


@dataclass(frozen=True)
class ScheduleConfig(Keys, group="schedule"):
    """Linear warm-up from 1e-5, then cosine; the routers' rate follows the same curve, scaled."""

    warmup_steps: int = key("steps of linear warm-up", 2, at_least=0)
    final_learning_rate: float = key("learning rate of the last step", 5e-6, at_least=0)
    anneal_steps: int = key(
        "steps over which active heads fall from all of them to the model's number; 0: at once", 0, at_least=0
    )


@dataclass(frozen=True)
class ObjectiveConfig(Keys, group="objective"):
    """The loss: the task's loss + balance_coefficient * load-balance loss (Eq. 8)."""

    kind: Literal["distillation", "cross_entropy"] = key(
        "distillation: KL to the base's next-token distribution; cross_entropy: to the text", "distillation"
    )
    temperature: float = key("softmax temperature of both sides of the KL", 1.0, above=0)
    balance_coefficient: float | None = key(
        "weight beta of the load-balance loss; null: the model's head_balance_coef", None, at_least=0
    )
    layer_coefficient: float = key(
        "distillation: weight of the layers' squared distance to the base's, relative to their size; 0: none",
        0.0,
        at_least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.layer_coefficient == 0 or self.has_teacher,
            f"objective.layer_coefficient={self.layer_coefficient} needs the base to compare with: "
            "set objective.kind to distillation",
        )

    @property
    def has_teacher(self) -> bool:
        """Whether the objective distills from the reference."""
        return self.kind == "distillation"


@dataclass(frozen=True)
class LoraConfig(Keys, group="lora"):
    """Low-rank adapters on the named projections; routers are trained in full beside them."""

    rank: int = key("rank of the adapters", 16, at_least=1)
    alpha: float = key("an adapter's output is scaled by alpha / rank", 32.0, above=0)
    dropout: float = key("dropout on the adapters' input", 0.0, at_least=0, below=1)
    target_modules: tuple[str, ...] = key(
        "names of the linear layers that get an adapter",
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.target_modules) > 0, "lora.target_modules is empty; name at least one, for example q_proj")


@dataclass(frozen=True)
class SharedHeadsConfig(Keys, group="shared_heads"):
    """Learns which heads are shared: those with the highest logits, one per head (`moh_llm.training.shared_heads`)."""

    number: int = key("heads of each layer that become shared", 1, at_least=1)
    steps: int = key(
        "steps over which the logits are learned; from then on the shared heads are fixed", 100, at_least=1
    )
    learning_rate: float = key(
        "highest learning rate of the logits; it falls linearly to 0 in these steps", 0.05, above=0
    )


@dataclass(frozen=True)
class EvaluationConfig(Keys, group="evaluation"):
    """Scoring on the mixture's held-out text."""

    eval_steps: int = key(
        "score before the first step and every this many steps; 0: only the saved model", 10, at_least=0
    )
    max_tokens: int | None = key(
        "held-out tokens to score, the first ones of each document; null: those of 64 documents", None, at_least=1
    )


@dataclass(frozen=True)
class CheckpointConfig(Keys, group="checkpoint"):
    """Checkpoints to resume from; one is always written after the last step."""

    save_steps: int = key("steps between checkpoints", 10, at_least=1)
    save_total_limit: int = key("checkpoints that are kept; older ones are removed", 2, at_least=1)
    milestone_every: int = key(
        "a checkpoint after a multiple of this many steps is kept for good; 0: none is", 0, at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.milestone_every % self.save_steps == 0,
            f"checkpoint.milestone_every={self.milestone_every} must be a multiple of "
            f"checkpoint.save_steps={self.save_steps}",
        )


@dataclass(frozen=True)
class DivergenceConfig(Keys, group="divergence"):
    """Handling of a step whose loss or gradient is not finite."""

    action: Literal["stop", "skip", "roll_back"] = key(
        "stop: end the run; skip: drop the step; roll_back: also go back to the last checkpoint's weights. Five "
        "dropped steps in a row end the run",
        "stop",
    )


@dataclass(frozen=True)
class HubConfig(Keys, group="hub"):
    """Publishing what the run makes, under the base's licence, as `moh-llm publish` does."""

    repo_id: str = key("repository that gets the tuned model, ORG/NAME (required)", "")
    milestones: bool = key("publish the model of each milestone, too, to a branch such as step-000100", False)

    def __post_init__(self) -> None:
        require("/" in self.repo_id, f"hub.repo_id={self.repo_id} must name a repository on the Hub, ORG/NAME")


@dataclass(frozen=True)
class TrainConfig(Keys):
    """One training run."""

    model: str = key("folder of a converted model (required)")
    output_dir: str = key("folder of the run: model/, checkpoints/, log.jsonl, run.json (required)")
    max_steps: int = key("optimiser steps (required)", at_least=1)
    base: str | None = key(
        "folder or Hub id of the checkpoint that the model was converted from; null: where the conversion found it",
        None,
    )
    seed: int = key("seed of data order, adapters and dropout", 0, at_least=0, below=2**32)
    mixed_precision: Literal["auto", "no", "bf16"] = key(
        "bf16: forward and backward in bfloat16, weights stay float32; no: all in float32; auto: bf16 where the device "
        "computes bfloat16 fast, else no, and in a resumed run what it chose",
        "auto",
    )
    gradient_checkpointing: bool = key("recompute activations in the backward pass to save memory", False)
    activation_offloading: bool = key(
        "with gradient_checkpointing: keep the inputs of recomputed layers in the CPU's memory until they are needed",
        False,
    )
    attn_implementation: Attention = key(
        "attention where all heads are on: sdpa, flash_attention_2, flash_attention_3 or flex_attention; all but sdpa "
        "need a CUDA device. Layers with heads off choose their attention by the device (moh-llm doctor says which)",
        "sdpa",
    )
    gate_gradient: GateGradient = key(
        "what the gate of a routed head learns from, the head less its fallback. exact: both are computed for every "
        "token; sampled: of the heads that are off one in 16 is computed, too, and counts 16 times; none: nothing, and "
        "routers learn from the load-balance loss alone. Frozen routers cost nothing extra with any of them",
        "exact",
    )
    quantization: Literal["nf4"] | None = key(
        "nf4: the weights under the adapters are held in 4 bits by bitsandbytes (QLoRA), and the adapters merged into "
        "those of the model folder; null: not quantized",
        None,
    )
    data: DataConfig = key("what is read", DataConfig())
    optimizer: OptimizerConfig = key("AdamW", OptimizerConfig())
    schedule: ScheduleConfig = key("learning rate over the steps", ScheduleConfig())
    objective: ObjectiveConfig = key("what is minimised", ObjectiveConfig())
    freeze_base: bool = key("train routers and fallbacks only; the base's weights stay as they are", False)
    lora: LoraConfig | None = key("low-rank adapters; null: every weight is trained", None)
    shared_heads: SharedHeadsConfig | None = key(
        "which heads are shared is learned, for a model without shared heads; null: shared heads stay as they are", None
    )
    evaluation: EvaluationConfig = key("scores on held-out text", EvaluationConfig())
    checkpoint: CheckpointConfig = key("checkpoints to resume from", CheckpointConfig())
    divergence: DivergenceConfig = key("what is done when loss or gradient is not finite", DivergenceConfig())
    hub: HubConfig | None = key("what is published on the Hub; null: nothing is", None)
    report_to: tuple[str, ...] = key(
        "where curves go beside log.jsonl: tensorboard, wandb, trackio, or another that accelerate knows",
        ("tensorboard",),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model != "", "model is empty; name the folder of a converted model")
        require(self.output_dir != "", "output_dir is empty; name a folder for the run")
        require(self.base != "", "base is empty; name the checkpoint that the model was converted from, or null")
        for name in ("model", "output_dir", "base"):
            if place := getattr(self, name):
                object.__setattr__(self, name, expand_home(place))
            check_path(place or "", name)
        check_path(self.data.mixture, "data.mixture")
        for name in ("warmup_steps", "anneal_steps"):
            steps = getattr(self.schedule, name)
            holds = steps <= self.max_steps
            require(
                holds, f"schedule.{name}={steps} must not exceed max_steps={self.max_steps}; lower it or train longer"
            )
        require(
            self.shared_heads is None or self.shared_heads.steps <= self.max_steps,
            f"shared_heads.steps={self.shared_heads and self.shared_heads.steps} must not exceed "
            f"max_steps={self.max_steps}; lower it or train longer",
        )
        last, highest = self.schedule.final_learning_rate, self.optimizer.learning_rate
        require(
            last <= highest,
            f"schedule.final_learning_rate={last} must not exceed optimizer.learning_rate={highest}; lower it too",
        )
        require(
            self.gradient_checkpointing or not self.activation_offloading,
            "activation_offloading=True is about layers that are recomputed: set gradient_checkpointing to true",
        )
        require(
            self.quantization is None or self.lora is not None,
            f"quantization={self.quantization} needs adapters, as 4-bit weights cannot be trained: set lora, or "
            "quantization to null",
        )
        require(
            not self.freeze_base or self.lora is None,
            "freeze_base=true leaves no weight for adapters: set lora to null, or freeze_base to false, as adapters "
            "leave the base's weights as they are, too",
        )
        require(
            self.hub is None or not self.hub.milestones or self.checkpoint.milestone_every > 0,
            "hub.milestones=true needs milestones: set checkpoint.milestone_every to the steps between them",
        )

    @property
    def is_base_frozen(self) -> bool:
        """Whether the base's weights are not trained, with adapters beside them or without."""
        return self.freeze_base or self.lora is not None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step reads."""
        return self.data.batch_size * self.data.sequence_length
