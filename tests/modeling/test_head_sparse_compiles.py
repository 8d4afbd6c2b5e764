"""The kernels are compiled for GPUs that need not be here, in a process of its own: this one may interpret them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_MEMORY = {90: 227 << 10, 86: 99 << 10}  # bytes per program, by compute capability
SCRIPT = """
import inspect, sys
import torch
from triton import compile, next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moh_llm.kernels import head_sparse_decoding as decoding, head_sparse_kernels as kernels
from moh_llm.kernels.head_sparse import tiles

capability, shared_memory, size = map(int, sys.argv[1:])
fixed = dict(H=32, G=8, D=size, BD=next_power_of_2(size), HAS_FIRST=True, HAS_MASK=False, GATED=True, PRECISION="tf32")
types = {name: "*bf16" for name in ("Q", "K", "V", "Out", "DOut", "DQ", "DK", "DV")}
types |= {name: "*i32" for name in ("Rows", "Counts", "First", "Before", "Whole", "Until")}
types |= {name: "*fp32" for name in ("Lse", "Delta", "Gate", "DGate", "Outs", "Lses")} | {"KeyMask": "*i8"}
types |= {"scale": "fp32", "scaling": "fp32"}
kinds = {"forward_kernel": "forward", "query_gradient_kernel": "queries", "key_gradient_kernel": "keys"}
others = [(decoding, "part_kernel"), (decoding, "join_kernel"), (kernels, "list_kernel")]
for module, name in [(kernels, name) for name in kinds] + others:
    kernel = getattr(module, name)
    if name in kinds:
        chosen = tiles(kinds[name], size, torch.bfloat16, shared_memory)
    else:
        chosen = {"BR": 16, "BN": decoding.BLOCK, "P": 32, "BT": 2048, "num_warps": 4, "num_stages": 3}
    options = {key: chosen.pop(key) for key in ("num_warps", "num_stages")}
    constants = {key: value for key, value in (fixed | chosen).items() if key in kernel.arg_names}
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    # As at run time: tensors and strides are multiples of 16.
    multiples = [i for i, arg in enumerate(kernel.arg_names) if signature[arg][0] == "*" or arg[1:2] == "_"]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in multiples})
    built = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert built.asm["cubin"]
    print(name, built.metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_and_fit_into_shared_memory(capability, tmp_path):
    words = [sys.executable, "-c", SCRIPT, str(capability), str(SHARED_MEMORY[capability]), "128"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    needed = {name: int(shared) for name, shared in map(str.split, done.stdout.splitlines())}
    assert len(needed) == 6
    assert max(needed.values()) <= SHARED_MEMORY[capability], needed
