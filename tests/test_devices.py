import pytest

from moh_llm.devices import GPUS, find_gpu, peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),  # which an A100 is not
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("h100 pcie", 756),
    ],
)
def test_the_longest_name_of_which_all_words_occur_wins(name, teraflops):
    assert peak_flops(name) == teraflops * 1e12


@pytest.mark.parametrize("name", ["", "NVIDIA L40", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 3090", "cpu"])
def test_of_others_nothing_is_known(name):
    assert peak_flops(name) is None and find_gpu(name) is None


def test_memory_is_of_the_variant_that_is_named():
    assert find_gpu("NVIDIA A100-SXM4-40GB").memory < 40 * 2**30 < find_gpu("A100").memory
    assert all(20 * 2**30 < gpu.memory < 192 * 2**30 for gpu in GPUS.values())
