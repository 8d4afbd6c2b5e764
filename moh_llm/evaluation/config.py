"""The options of an evaluation."""

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from moh_llm.options import Folder, Place, Places, options


@options()
class EvaluationConfig:
    """One evaluation: models and their base, a suite of benchmarks, and the folder of the report."""

    models: Places
    """Folders or Hub ids of the models to score."""

    output_dir: Folder = Path("out/report")
    """Folder of the report: `report.html`, `report.md`, `report.json`."""

    overwrite: bool = False
    """Replace the output folder if it is not empty."""

    base: Place | None = None
    """Folder or Hub id of the base. It is scored in the same run, and the models are compared with it."""

    suite: Place = "paper"
    """`paper`, `paper_stage1`, `scratch`, `ruler`, `smoke`, or a YAML file."""

    data_dir: Folder | None = None
    """Folder of local benchmark data. Files are `<dataset, / as __>/<config>/<split>.jsonl`, as `moh-llm data
    fetch-benchmarks` makes them. Default: the Hub. For models of images: a folder of images, an IDX file or a Hub
    dataset, OWNER/NAME:SPLIT."""

    limit: PositiveInt | None = None
    """Score only this many items of each task. Default: all of them."""

    batch_size: PositiveInt | Literal["auto"] = 8
    """Sequences per forward pass and process. `auto`: on a GPU 64, and fewer when memory runs out."""

    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype that all models are computed in. Whatever they are stored in. `auto`: bfloat16 where the device computes it
    fast, else float32."""

    device: str | None = None
    """Torch device, such as `cuda:1` or `cpu`. Default: the accelerator if there is one."""

    log_samples: bool = False
    """Write each item as lm-eval logs it. To `samples/MODEL/BENCHMARK.jsonl` in the output folder."""

    samples: NonNegativeInt = 0
    """Images that each DiT draws, in 250 steps. Written as a grid and as the .npz that ADM's evaluator takes."""

    analysis: bool = True
    """Analysis of what the heads did on the benchmarks' text."""
