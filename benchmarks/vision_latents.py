"""Latents of images, as recipes/moh_dit_*.yaml read them.

    python benchmarks/vision_latents.py photos/train out/latents/train.safetensors
    python benchmarks/vision_latents.py ILSVRC/imagenet-1k:validation out/latents/validation.safetensors

Images are scaled and cropped to the VAE's size (256 x 256 pixels) and encoded: one sample of each image's distribution,
times the VAE's scaling factor (0.18215). The file has `images` `[N, C, H, W]` in float16 and, where the images have
classes, `labels` `[N]`. All latents are in memory until it is written, 8 KB each. Needs the extra `vision`.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from command import status_of
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from tqdm import tqdm
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from moh_llm.devices import choose_device
from moh_llm.errors import UserError, reason
from moh_llm.vision.images import open_dataset


@torch.no_grad()
def encode(place: str, vae: AutoencoderKL, batch_size: int) -> dict[str, torch.Tensor]:
    """Latents and labels of a folder or a Hub dataset, in its order. Raises UserError where there are no images."""
    rows, labels, _ = open_dataset(place)
    size, draw, found = vae.config.sample_size, torch.Generator().manual_seed(0), []
    scale = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # pixels from -1 to 1
    processor = BitImageProcessorPil(size={"shortest_edge": size}, crop_size=size, **scale)
    for first in tqdm(range(0, len(rows), batch_size), desc="encode", unit="batch"):
        [images] = rows[first : first + batch_size].values()
        pixels = processor([image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
        latents = vae.encode(pixels.to(vae.device)).latent_dist
        noise = torch.randn(latents.mean.shape, generator=draw).to(vae.device)
        found.append(((latents.mean + latents.std * noise) * vae.config.scaling_factor).half().cpu())
    return {"images": torch.cat(found)} | ({} if labels is None else {"labels": labels})


def run(args: argparse.Namespace) -> None:
    """Encode, and write the file. Raises UserError for images or a VAE that cannot be read."""
    try:
        vae = AutoencoderKL.from_pretrained(args.vae, use_safetensors=True).to(choose_device()).eval()
    except (OSError, ValueError) as error:
        why = f"{args.vae} is no VAE of diffusers ({reason(error)[:200]})"
        raise UserError(f"{why}; name its folder or Hub id") from error
    tensors = encode(args.images, vae, args.batch_size)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.output.with_name(f".{args.output.name}.tmp")
    save_file(tensors, temporary)
    os.replace(temporary, args.output)
    print(f"{args.output}: {len(tensors['images']):,} latents{'' if 'labels' in tensors else ' without labels'}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="folder with a sub-folder for each class, or a Hub dataset, OWNER/NAME:SPLIT")
    parser.add_argument("output", type=Path, help="file to write, .safetensors")
    parser.add_argument("--vae", default="stabilityai/sd-vae-ft-ema", help="folder or Hub id (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32)
    return status_of(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
