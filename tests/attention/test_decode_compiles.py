"""The kernels are compiled for GPUs that need not be here, in a process of its own: this one may interpret them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes per program, by compute capability
SCRIPT = """
import sys
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moh_llm.attention import decode as decoding

bf16, fp32 = (torch.bfloat16, "*bf16"), (torch.float32, "*fp32")
for shared, size, (dtype, name) in ((4, 128, bf16), (16, 256, fp32), (64, 256, bf16)):
    tile = decoding.tiles(shared, size, dtype)
    options = {key: tile.pop(key) for key in ("num_warps", "num_stages")}
    constants = tile | dict(H=8 * shared, G=8, D=size, P=64, HAS_DISTANT=True, HAS_MASK=True)
    constants |= {"PRECISION": "ieee" if dtype == torch.float32 else "tf32"}
    types = {arg: name for arg in ("Q", "K", "V", "Distant", "Out")} | {"scale": "fp32"}
    types |= {"Visible": "*u8"} | {arg: "*i64" for arg in ("First", "Start", "SinkEnd", "Last", "Hidden")}
    types |= {arg: "*fp32" for arg in ("Outs", "Lses", "Score")}
    for kernel in (decoding.part_kernel, decoding.join_kernel):
        fixed = {arg: value for arg, value in constants.items() if arg in kernel.arg_names}
        signature = {arg: "constexpr" if arg in fixed else types.get(arg, "i32") for arg in kernel.arg_names}
        # As at run time: tensors and strides are multiples of 16.
        multiples = [i for i, arg in enumerate(kernel.arg_names) if signature[arg][0] == "*" or arg[1:2] == "_"]
        source = ASTSource(kernel, signature, fixed, {(i,): [["tt.divisibility", 16]] for i in multiples})
        built = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
        assert built.asm["cubin"]
        print(built.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_and_fit_into_shared_memory(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", SCRIPT, str(capability)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    needed = [int(line) for line in done.stdout.splitlines()]
    assert len(needed) == 6
    assert max(needed) <= SHARED_MEMORY[capability], needed
