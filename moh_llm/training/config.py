"""The options of a training run: a few frozen dataclasses (`moh_llm.options`)."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from moh_llm.errors import UserError
from moh_llm.options import Names, Place, options

GateGradient = Literal["exact", "none"]
# What Accelerate knows. Importing it takes seconds, so the names stand here; a test compares them.
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


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
        if self.batch_size % self.micro_batch_size:
            size = f"data.batch_size={self.batch_size}"
            raise UserError(f"{size} must be a multiple of data.micro_batch_size={self.micro_batch_size}")


@options("images")
class ImagesConfig:
    """Images that a ViT or DiT is trained on; null: the model is a language model, and reads `data.mixture`."""

    train: Place
    """A folder of images, an IDX file, or a Hub dataset, OWNER/NAME:SPLIT."""

    held_out: Place | None = None
    """Images to score in the run and at its end, up to 1,024 of them; null: none."""

    flip: bool = True
    """Mirror each image with a probability of 1/2."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread evenly over the classes; only with `cross_entropy`."""

    label_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the labels that a denoiser reads as "no class", which guidance needs."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a moving average of the weights, which is saved in their place; null: none."""


@options("optimizer")
class OptimizerConfig:
    """AdamW with betas of 0.9 and 0.95."""

    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate."""

    router_learning_rate: PositiveFloat | None = 1e-3
    """Peak learning rate of the routers; null: `learning_rate`."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices. Biases and norms have none."""

    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are clipped to this L2 norm; null: not clipped."""


@options("schedule")
class ScheduleConfig:
    """Learning rate over the steps: linear warm-up from 1e-5, then cosine. The routers' follows it, scaled."""

    warmup_steps: NonNegativeInt = 2
    """Steps of linear warm-up."""

    final_learning_rate: NonNegativeFloat = 5e-6
    """Learning rate of the last step."""


@options("objective")
class ObjectiveConfig:
    """The loss that is minimized."""

    kind: Literal["distillation", "cross_entropy", "noise"] = "distillation"
    """`distillation`: KL to the base's next-token distribution; `cross_entropy`: to the text. Of images: KL to the
    base's classes, or the squared error to the output of a base without classes; cross-entropy to the labels. `noise`:
    a DiT's squared error to the noise, with the variational term where it learns the variance."""

    keys: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the base's keys that threshold routers may read; null: that of the last run or the conversion. It
    is that of a document of `data.sequence_length` tokens, and the loss holds the routers at it."""

    balance_coefficient: NonNegativeFloat | None = None
    """Weight of the load-balance loss; null: the model's `head_balance_coef`. Threshold routers have none."""

    @property
    def has_teacher(self) -> bool:
        """Whether the objective distills from the reference."""
        return self.kind == "distillation"


@options("lora")
class LoraConfig:
    """Low-rank adapters; null: every weight is trained. Routers are trained in full, too."""

    rank: PositiveInt = 16
    """Rank of the adapters."""

    alpha: PositiveFloat = 32.0
    """An adapter's output is scaled by alpha / rank."""

    target_modules: Names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get an adapter."""

    def __post_init__(self) -> None:
        if not self.target_modules:
            raise UserError("lora.target_modules is empty; name at least one, for example q_proj")


@options("evaluation")
class HeldOutConfig:
    """Scores on the mixture's held-out text."""

    eval_steps: NonNegativeInt = 10
    """Score before the first step and every this many steps; 0: only the saved model."""

    max_tokens: PositiveInt | None = None
    """Held-out tokens to score, the first ones of each document; null: those of 64 documents or more."""


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
        if self.milestone_every % self.save_steps:
            every = f"checkpoint.milestone_every={self.milestone_every}"
            raise UserError(f"{every} must be a multiple of checkpoint.save_steps={self.save_steps}")


@options("hub")
class HubConfig:
    """What is published on the Hub, as `moh-llm publish` does; null: nothing. Under the base's licence."""

    repo_id: str
    """Repository that gets the tuned model, `ORG/NAME`. One that is private stays so."""

    def __post_init__(self) -> None:
        if "/" not in self.repo_id:
            raise UserError(f"hub.repo_id={self.repo_id} must name a repository on the Hub, ORG/NAME")


@options()
class TrainConfig:
    """One training run."""

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
    """Seed of data order and adapters."""

    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """`bf16`: forward and backward in bfloat16; `no`: in float32; `auto`: what is fast. Weights stay float32. `auto`
    takes bf16 where the device computes bfloat16 fast, and in a resumed run what it chose before."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. It saves memory and takes about a third more time."""

    gate_gradient: GateGradient = "exact"
    """What routers learn from. `exact`: the head less its fallback; both are computed for every token. `none`: the
    load-balance loss alone. Frozen routers cost nothing extra with either."""

    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    objective: ObjectiveConfig = ObjectiveConfig()

    freeze_base: bool = False
    """Train routers and fallbacks only. The base's weights stay as they are, bit for bit. Not with `lora`, which does
    not train them either."""

    lora: LoraConfig | None = None
    images: ImagesConfig | None = None
    evaluation: HeldOutConfig = HeldOutConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    hub: HubConfig | None = None

    report_to: Names = ("tensorboard",)
    """Where curves go in addition to `log.jsonl`: tensorboard, wandb, trackio; []: nowhere. Or another that Accelerate
    knows."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.report_to if name not in TRACKERS]:
            raise UserError(f"report_to: {unknown[0]!r} is unknown; known are {', '.join(TRACKERS)}")
        if (steps := self.schedule.warmup_steps) > self.max_steps:
            raise UserError(f"schedule.warmup_steps={steps} must not exceed max_steps={self.max_steps}; lower it")
        if (rate := self.schedule.final_learning_rate) > (highest := self.optimizer.learning_rate):
            last = f"schedule.final_learning_rate={rate}"
            raise UserError(f"{last} must not exceed optimizer.learning_rate={highest}; lower it too")
        if self.objective.kind == "noise" and self.images is None:
            raise UserError("objective.kind=noise is for a DiT and its images; set distillation or cross_entropy")
        if self.freeze_base and self.lora is not None:
            raise UserError(
                "freeze_base=true leaves no weight for adapters: set lora to null, or freeze_base to false, as "
                "adapters leave the base's weights as they are, too"
            )

    @property
    def is_base_frozen(self) -> bool:
        """Whether the base's weights are not trained, with adapters beside them or without."""
        return self.freeze_base or self.lora is not None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads."""
        return self.data.batch_size * self.data.sequence_length

    @property
    def step_size(self) -> tuple[int, str]:
        """How much one optimizer step reads, and of what: tokens or images."""
        return (self.data.batch_size, "images") if self.images else (self.tokens_per_step, "tokens")


# Options and groups that a resumed run may change. `model`, `base` and the mixture are places: the record has hashes of
# what they name, and those are compared.
_PLACES = {"model", "output_dir", "base", "hub", "data.mixture"}
_HARMLESS = {"gradient_checkpointing", "checkpoint", "report_to", "evaluation.eval_steps"}


def changed_options(
    recorded: dict[str, Any], current: dict[str, Any], finished: bool = False, prefix: str = ""
) -> list[str]:
    """Dotted options whose values differ between two recipes (nested dicts) and may not change on resume.

    With ``finished`` those that leave the training curve as it was (``gradient_checkpointing``, say) count, too, since
    they would have no effect. ``prefix`` is the group that the recipes are of.
    """
    may_change, changed = _PLACES if finished else _PLACES | _HARMLESS, []
    for name in sorted(recorded.keys() | current.keys()):
        old, new, option = recorded.get(name), current.get(name), prefix + name
        if option in may_change or old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_options(old, new, finished, f"{option}.")
        else:
            changed.append(option)
    return changed
