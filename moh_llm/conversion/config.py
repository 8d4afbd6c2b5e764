"""The options of a conversion: which heads are on, what replaces the others, and the text to fit and verify on."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from moh_llm.errors import UserError
from moh_llm.options import Folder, Place, Places, options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WINDOW = 256  # tokens, from 4,096 tokens of context on; docs/results/data/long_context.json compares windows
_MOST_START = 1024  # tokens: with fewer, attention is too small a part of the time for heads to matter


@options(kw_only=True)
class PlanOptions:
    """Which heads are on, and what replaces the others. None stands for the preset's choice, or else the default."""

    preset: Literal["paper"] | None = None
    """`paper`: half of the heads shared, 3/4 active. Query-norm router, even budgets and no fallback, as in the paper;
    the first heads are the shared ones."""

    num_shared_heads: NonNegativeInt | None = None
    """Heads of each layer that are always on. Default: those that the fit finds; with other fallbacks than `local`, or
    the router `query_norm`, 1/8 of the heads and at least 1."""

    num_active_heads: int | None = None
    """Mean heads per token and layer (default: 3/4). Shared heads count. Layers differ unless `budgets` is `even`."""

    keys: Annotated[float, Field(gt=0, le=1)] | None = None
    """Budget as a share of the keys that the base reads. Measured at `context` tokens; replaces `num_active_heads`."""

    shared: Literal["first", "importance"] = "first"
    """Which heads are shared: the first, or those that cost most to drop. Without effect where the fit finds them."""

    router: Literal["linear", "threshold", "query_norm", "none"] | None = None
    """How tokens choose heads. `threshold`: all heads with a score above zero, the default with local fallbacks.
    `linear`: the same number of heads for each token, the default otherwise. `query_norm`: the heads with the largest
    queries. `none`: the same heads for all tokens."""

    routing_granularity: Literal["head", "kv_group"] = "head"
    """What is on or off as one. A head, or all heads that share keys and values."""

    budgets: Literal["uneven", "even"] | None = None
    """Active heads per layer: by what each layer loses, or equal. Default: `uneven`; `even` for the preset and for
    `query_norm`."""

    fallback: Literal["value", "local", "none"] | None = None
    """What replaces a head that is off. `local`: attention to the last and first tokens, and to one fitted token for
    those between. `value`: a fitted vector and a share of the token's own value. `none`: zero. Default: `local`; `none`
    for the preset and for `query_norm`."""

    local_window: PositiveInt | None = None
    """Last tokens that a local fallback reads. Default: 256, and below 4,096 tokens of context a sixteenth of it."""

    local_sinks: NonNegativeInt = 4
    """First tokens that a local fallback reads."""

    local_start: NonNegativeInt | None = None
    """First tokens of a document with all heads on. With local fallbacks. Default: an eighth of the context, at most
    1,024."""

    context: PositiveInt = 8192
    """Tokens per sequence of text. At most what the base was made for; calibrate at the length that the model is
    for."""

    def __post_init__(self) -> None:
        if self.router_type == "query_norm" and (self.budgets == "uneven" or self.fallback in ("value", "local")):
            raise UserError("uneven budgets and fallbacks are fitted together with the linear router; drop query_norm")
        if self.local_start is not None and self.local_start >= self.context:
            raise UserError(f"local_start={self.local_start} must be below the context of {self.context} tokens")
        if self.router == "threshold" and self.head_fallback != "local":
            raise UserError("the threshold router is fitted with local fallbacks; add --fallback local")
        if self.router == "none" and self.num_shared_heads is not None:
            raise UserError("with --router none the heads that are on are the shared ones; drop --num-shared-heads")

    @property
    def router_type(self) -> str:
        """The router to build: the one asked for, else the preset's, else what goes with the fallback."""
        if self.router or self.preset:
            return self.router or "query_norm"
        return "threshold" if self.head_fallback == "local" else "linear"

    @property
    def uneven(self) -> bool:
        """Whether layers may differ in their number of active heads."""
        return (self.budgets or ("uneven" if self.fits and self.preset is None else "even")) == "uneven"

    @property
    def head_fallback(self) -> str:
        """The config's field."""
        if self.fallback:
            return self.fallback
        return "none" if self.preset or self.router == "query_norm" else "local"

    @property
    def all_heads_until(self) -> int:
        """Number of first tokens of a document that have all heads on, with local fallbacks."""
        return max(self.start, self.window + self.local_sinks)

    @property
    def window(self) -> int:
        """The config's `local_window`."""
        return min(_WINDOW, max(1, self.context // 16)) if self.local_window is None else self.local_window

    @property
    def start(self) -> int:
        """The config's `local_start`."""
        return min(_MOST_START, self.context // 8) if self.local_start is None else self.local_start

    @property
    def fits(self) -> bool:
        """Whether each layer is fitted to text: its router, its fallbacks, or which heads are on for all tokens."""
        return self.router_type != "query_norm"

    @property
    def needs_calibration(self) -> bool:
        """Whether the plan depends on running the base over text."""
        return self.fits or self.shared == "importance"

    @property
    def mixes(self) -> bool:
        """Whether the fit finds which heads of a layer are shared, routed and never on."""
        ours = self.head_fallback == "local" and self.preset is None
        return self.fits and self.num_shared_heads is None and (ours or self.router_type == "none")

    def heads_per_group(self, config: "PreTrainedConfig") -> int:
        """Number of heads of that base which are switched together."""
        return config.num_attention_heads // config.num_key_value_heads if self.routing_granularity == "kv_group" else 1


@options(kw_only=True)
class ConversionConfig(PlanOptions):
    """One conversion: a base, a folder to make, the head plan, and the text to fit and verify on."""

    WITHOUT_FLAG: ClassVar[tuple[str, ...]] = ("shared", "budgets", "local_sinks")

    base: Place
    """Folder or Hub id[@REVISION] of a checkpoint in safetensors, dense or MoH."""

    output_dir: Folder
    """Folder to make."""

    overwrite: bool = False
    """Replace the output folder if it is not empty."""

    calibration: Places | None = None
    """Text to fit and verify on: files, or one mixture. Files (`.jsonl`, `.json.gz`, `.jsonl.zst`, `.txt`, `.parquet`)
    count equally; a mixture is a YAML file. Verification reads a held-out part. Default: the text that Python ships.
    For a model of images: one folder, IDX file or Hub dataset of images."""

    calibration_tokens: PositiveInt = 24576
    """Tokens to fit on; patches of images."""

    heldout_tokens: NonNegativeInt | None = None
    """Tokens to verify on; 0: no verification. The first ones of each document; null: 64 or more documents."""

    tokenizer: Place | None = None
    """Tokenizer with new tokens: folder or Hub id. It has all tokens of the base with their ids. A new token's row is
    the mean of the rows of its pieces. Default: the base's tokenizer."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype of the written weights. Default: the base's own, so that its bytes stay as they are."""

    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype that the base is run in. `auto`: bfloat16 where the device computes it fast, else float32."""
