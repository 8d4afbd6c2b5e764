"""The options of a training run: a few frozen dataclasses (`moh_llm.options`)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from moh_llm.errors import UserError
from moh_llm.options import Names, Pair, Place, options
from moh_llm.training.changed_options import REMOVED

Attention = Literal["sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
GateGradient = Literal["exact", "sampled", "none"]


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


@options("data")
class DataConfig:
    """Text, and how much of it each step reads."""

    mixture: Place = "embedded"
    """Data mixture: a YAML file or `embedded`, tokenized on the way, or a folder of `moh-llm tokenize`. `embedded` is
    what Python itself ships: documentation, sources, docstrings."""

    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Tokens per sequence."""

    batch_size: PositiveInt = 4
    """Sequences per optimizer step, over all processes."""

    micro_batch_size: PositiveInt = 1
    """Sequences per forward pass. The rest of a step is accumulated, with the same result. Scoring uses it, too."""

    def __post_init__(self) -> None:
        _require(
            self.batch_size % self.micro_batch_size == 0,
            f"data.batch_size={self.batch_size} must be a multiple of data.micro_batch_size={self.micro_batch_size}",
        )


@options("optimizer")
class OptimizerConfig:
    """AdamW."""

    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate."""

    router_learning_rate: PositiveFloat | None = 1e-3
    """Peak learning rate of the routers; null: `learning_rate`."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices. Biases and norms have none."""

    betas: Pair = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""

    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are clipped to this L2 norm; null: not clipped."""

    def __post_init__(self) -> None:
        holds = all(0 <= beta < 1 for beta in self.betas)
        _require(holds, f"optimizer.betas={list(self.betas)} must both lie in [0, 1)")


@options("schedule")
class ScheduleConfig:
    """Learning rate over the steps: linear warm-up from 1e-5, then cosine. The routers' follows it, scaled."""

    warmup_steps: NonNegativeInt = 2
    """Steps of linear warm-up."""

    final_learning_rate: NonNegativeFloat = 5e-6
    """Learning rate of the last step."""

    anneal_steps: NonNegativeInt = 0
    """Steps over which the active heads fall from all of them to the model's number; 0: at once."""


@options("objective")
class ObjectiveConfig:
    """The loss that is minimized."""

    kind: Literal["distillation", "cross_entropy"] = "distillation"
    """`distillation`: KL to the base's next-token distribution; `cross_entropy`: to the text."""

    temperature: PositiveFloat = 1.0
    """Softmax temperature of both sides of the KL."""

    balance_coefficient: NonNegativeFloat | None = None
    """Weight of the load-balance loss; null: the model's `head_balance_coef`."""

    layer_coefficient: NonNegativeFloat = 0.0
    """Distillation: weight of the layers' squared distance to the base's; 0: none. The distance is relative to the size
    of the base's layer outputs."""

    def __post_init__(self) -> None:
        _require(
            self.layer_coefficient == 0 or self.has_teacher,
            f"objective.layer_coefficient={self.layer_coefficient} needs the base to compare with: "
            "set objective.kind to distillation",
        )

    @property
    def has_teacher(self) -> bool:
        """Whether the objective distills from the reference."""
        return self.kind == "distillation"


@options("lora")
class LoraConfig:
    """Low-rank adapters; null: every weight is trained. Routers are trained in full beside them."""

    rank: PositiveInt = 16
    """Rank of the adapters."""

    alpha: PositiveFloat = 32.0
    """An adapter's output is scaled by alpha / rank."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input."""

    target_modules: Names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get an adapter."""

    def __post_init__(self) -> None:
        _require(len(self.target_modules) > 0, "lora.target_modules is empty; name at least one, for example q_proj")


@options("shared_heads")
class SharedHeadsConfig:
    """Learn which heads are shared, for a model without shared heads; null: they stay as they are."""

    number: PositiveInt = 1
    """Heads of each layer that become shared."""

    steps: PositiveInt = 100
    """Steps over which the choice is learned. From then on the shared heads are fixed."""

    learning_rate: PositiveFloat = 0.05
    """Peak learning rate of the heads' logits. It falls linearly to 0 in these steps."""


@options("evaluation")
class HeldOutConfig:
    """Scores on the mixture's held-out text."""

    eval_steps: NonNegativeInt = 10
    """Score before the first step and every this many steps; 0: only the saved model."""

    max_tokens: PositiveInt | None = None
    """Held-out tokens to score, the first ones of each document; null: those of 64 documents."""


@options("checkpoint")
class CheckpointConfig:
    """Checkpoints to resume from. One is always written after the last step."""

    save_steps: PositiveInt = 10
    """Steps between checkpoints."""

    save_total_limit: PositiveInt = 2
    """Checkpoints that are kept. Older ones are removed."""

    milestone_every: NonNegativeInt = 0
    """Keep the checkpoints after multiples of this many steps for good; 0: none."""

    def __post_init__(self) -> None:
        _require(
            self.milestone_every % self.save_steps == 0,
            f"checkpoint.milestone_every={self.milestone_every} must be a multiple of "
            f"checkpoint.save_steps={self.save_steps}",
        )


@options("divergence")
class DivergenceConfig:
    """What happens at a step whose loss or gradient is not finite."""

    action: Literal["stop", "skip", "roll_back"] = "stop"
    """`stop`: end the run; `skip`: drop the step; `roll_back`: also go back to the last checkpoint's weights. Five
    dropped steps in a row end the run."""


@options("hub")
class HubConfig:
    """What is published on the Hub, as `moh-llm publish` does; null: nothing. Under the base's licence."""

    repo_id: str
    """Repository that gets the tuned model, `ORG/NAME`. One that is private stays so."""

    def __post_init__(self) -> None:
        _require("/" in self.repo_id, f"hub.repo_id={self.repo_id} must name a repository on the Hub, ORG/NAME")


@options()
class TrainConfig:
    """One training run."""

    REMOVED: ClassVar[dict[str, str]] = REMOVED | {
        "output": "output_dir names the folder of the run",
        "trackers": "report_to names them",
        "data.block_length": "data.sequence_length has the tokens per sequence",
        "optimizer.max_gradient_norm": "optimizer.max_grad_norm clips the gradients",
        "evaluation.every": "evaluation.eval_steps has the steps between two scores",
        "checkpoint.every": "checkpoint.save_steps has the steps between checkpoints",
        "checkpoint.keep_last": "checkpoint.save_total_limit says how many are kept",
        "sparse_gate_gradient": "gate_gradient says what routers learn from",
    }

    model: Place
    """Folder of a converted model."""

    output_dir: Place
    """Folder of the run: `model/`, `checkpoints/`, `log.jsonl`, `run.json`."""

    max_steps: PositiveInt
    """Optimizer steps."""

    base: Place | None = None
    """Folder or Hub id of the model's base, where it has moved; null: where the conversion found it. All scores are
    against it, also after several runs."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of data order, adapters and dropout."""

    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """`bf16`: forward and backward in bfloat16; `no`: in float32; `auto`: what is fast. Weights stay float32. `auto`
    takes bf16 where the device computes bfloat16 fast, and in a resumed run what it chose before."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. It saves memory and takes about a third more time."""

    activation_offloading: bool = False
    """With `gradient_checkpointing`: keep layer inputs in CPU memory."""

    attn_implementation: Attention = "sdpa"
    """Attention where all heads are on. All but `sdpa` need a CUDA device. Layers with heads off choose their attention
    by the device; `moh-llm doctor` says which."""

    gate_gradient: GateGradient = "exact"
    """What routers learn from: the head less its fallback, for all tokens, a sample or none. `exact`: both are computed
    for every token. `sampled`: of the heads that are off one in 16 is computed and counts 16 times. `none`: routers
    learn from the load-balance loss alone. Frozen routers cost nothing extra with any of them."""

    quantization: Literal["nf4"] | None = None
    """`nf4`: the weights under the adapters in 4 bits (QLoRA); null: not quantized. By bitsandbytes, with `lora`; the
    adapters are merged into the weights of the model folder."""

    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    objective: ObjectiveConfig = ObjectiveConfig()

    freeze_base: bool = False
    """Train routers and fallbacks only. The base's weights stay as they are, bit for bit. Not with `lora`, which does
    not train them either."""

    lora: LoraConfig | None = None
    shared_heads: SharedHeadsConfig | None = None
    evaluation: HeldOutConfig = HeldOutConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    divergence: DivergenceConfig = DivergenceConfig()
    hub: HubConfig | None = None

    report_to: Names = ("tensorboard",)
    """Where curves go beside `log.jsonl`: tensorboard, wandb, trackio; []: nowhere. Or another that Accelerate
    knows."""

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "anneal_steps"):
            steps = getattr(self.schedule, name)
            holds = steps <= self.max_steps
            _require(
                holds, f"schedule.{name}={steps} must not exceed max_steps={self.max_steps}; lower it or train longer"
            )
        _require(
            self.shared_heads is None or self.shared_heads.steps <= self.max_steps,
            f"shared_heads.steps={self.shared_heads and self.shared_heads.steps} must not exceed "
            f"max_steps={self.max_steps}; lower it or train longer",
        )
        last, highest = self.schedule.final_learning_rate, self.optimizer.learning_rate
        _require(
            last <= highest,
            f"schedule.final_learning_rate={last} must not exceed optimizer.learning_rate={highest}; lower it too",
        )
        _require(
            self.gradient_checkpointing or not self.activation_offloading,
            "activation_offloading=True is about layers that are recomputed: set gradient_checkpointing to true",
        )
        _require(
            self.quantization is None or self.lora is not None,
            f"quantization={self.quantization} needs adapters, as 4-bit weights cannot be trained: set lora, or "
            "quantization to null",
        )
        _require(
            not self.freeze_base or self.lora is None,
            "freeze_base=true leaves no weight for adapters: set lora to null, or freeze_base to false, as adapters "
            "leave the base's weights as they are, too",
        )

    @property
    def is_base_frozen(self) -> bool:
        """Whether the base's weights are not trained, with adapters beside them or without."""
        return self.freeze_base or self.lora is not None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads."""
        return self.data.batch_size * self.data.sequence_length
