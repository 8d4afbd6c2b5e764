"""The strategies of training as `accelerate launch` sets them for the files of recipes/accelerate, for forked programs.

forks.run("train.py", ..., environment=WAYS["fsdp2"], processes=2)
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_ALL = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
DDP = _ALL | {"ACCELERATE_USE_CPU": "False"}
FSDP = DDP | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
FSDP |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
ZERO = _ALL | {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
WAYS = {"ddp": DDP, "fsdp2": FSDP} | {f"zero{n}": ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": n} for n in "123"}
