"""What all tests share: tiny random LLaMAs with a byte tokenizer, made in temporary folders."""

import gc
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Read when the libraries are first imported. Two workers with two threads each would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MOH_LLM_COMPUTE_DTYPE"] = "float32"  # the same figures on every machine; tests of "auto" unset it

import pytest
import torch
from builds import enter
from filelock import FileLock
from tiny import save_byte_tokenizer, save_model

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are first imported

ROOT = Path(__file__).resolve().parents[1]
EXTENSIONS = Path(sys.prefix) / "torch-extensions"


def pytest_configure(config: pytest.Config) -> None:
    """Keep what DeepSpeed compiles in the virtual environment."""
    if "TORCH_EXTENSIONS_DIR" not in os.environ and os.access(sys.prefix, os.W_OK):
        os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)  # pytest-xdist's workers inherit it
        enter(EXTENSIONS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`made_once(name, make)`: the folder that `make(folder)` fills, made by one of pytest-xdist's workers for all.

    It is for reading only: a test that changes files works on a copy.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        with FileLock(root / f"{name}.lock"):
            if not (root / name).exists():
                shutil.rmtree(root / f"{name}.tmp", ignore_errors=True)
                (root / f"{name}.tmp").mkdir()
                make(root / f"{name}.tmp")
                (root / f"{name}.tmp").rename(root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(autouse=True)
def working_folder(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs in an empty folder and leaves it empty, so none depends on where pytest was started."""
    monkeypatch.chdir(elsewhere)
    yield
    left = sorted(elsewhere.iterdir())
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not left, "the test left files in the working folder"


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> None:
    """Garbage collection leaves out the modules imported so far: a training run collects, and they take most of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[[Path], int]:
    """`save_byte_tokenizer`, for the folders below."""
    return save_byte_tokenizer


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of tokens that is the tests' own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOH_LLM_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data that some workplaces hold beside the checkout."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random model of a config class with a byte tokenizer and return its folder; keywords are config fields.

    `dtype` and `max_shard_size` go to saving. Weights are drawn wide, so that a head that is off is
    felt, and with `vectors` biases and norms, too, so that one that is lost is.
    """
    from transformers import PreTrainedConfig

    def make(
        config_class: type[PreTrainedConfig],
        dtype: torch.dtype = torch.float32,
        max_shard_size: str = "1GB",
        vectors: bool = True,
        **fields: object,
    ) -> Path:
        folder = tmp_path_factory.mktemp(config_class.model_type)
        save_model(folder, config_class, dtype, max_shard_size, vectors, **fields)
        return folder

    return make


@pytest.fixture(scope="session")
def make_llama(make_model: Callable[..., Path]) -> Callable[..., Path]:
    """`make_model` of a LLaMA whose norms are all ones."""
    from transformers import LlamaConfig

    return lambda **fields: make_model(LlamaConfig, vectors=False, **fields)


@pytest.fixture(scope="session")
def river(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text file."""
    text = "The river was high that spring, and the boats lay tied to the poplars below the mill. " * 40
    path = tmp_path_factory.mktemp("text") / "river.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i}. {text}"}) + "\n" for i in range(48)))
    return path


@pytest.fixture(scope="session")
def convert(river: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """`moh-llm convert BASE --output-dir OUTPUT FLAGS` on little text; returns the exit status.

    `shared=X`, `budgets=X` and `local_sinks=N` among the flags are lines of a recipe.
    """
    from moh_llm.cli import main

    def run(base: Path, output: Path, *flags: str) -> int:
        small = ["--calibration", str(river), "--calibration-tokens", "1024", "--heldout-tokens", "256"]
        lines = [flag for flag in flags if flag.startswith(("shared=", "budgets=", "local_sinks="))]
        flags, source = tuple(flag for flag in flags if flag not in lines), base
        if lines:
            source = tmp_path_factory.mktemp("recipe") / "convert.yaml"
            source.write_text(json.dumps({"base": str(base)} | dict(line.split("=") for line in lines)))
        return main(["convert", str(source), "--output-dir", str(output), *small, *flags])

    return run


@pytest.fixture(scope="session")
def read_tensors() -> Callable[[Path], dict[str, torch.Tensor]]:
    """All tensors of a model's folder by name."""
    from safetensors.torch import load_file

    def read(folder: Path) -> dict[str, torch.Tensor]:
        return {name: t for shard in folder.glob("*.safetensors") for name, t in load_file(shard).items()}

    return read


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are drawn but not rendered, which is most of a report's time: each is an empty SVG."""

    def save(self: object, target: io.BytesIO, **_: object) -> None:
        target.write(b'<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are split over threads, so equal bits need equal numbers of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
