"""Devices: published facts, lookups, and what a driver reports."""

import pytest

from vitrail.config.finding import Refused
from vitrail.config.hardware import ARCHITECTURES, CPU, GPUS, find, from_device


def test_names_are_found_in_any_case():
    for device in (CPU, *GPUS):
        assert find(device.name.upper()) is device
    with pytest.raises(Refused, match="'H300'.*H200"):
        find("H300")


def test_every_kernel_target_is_a_device():
    assert {d.cc for d in GPUS} == {80, 89, 90, 100, 103, 110, 120}
    assert len({d.name for d in GPUS}) == len(GPUS)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
def test_facts_fit_each_other(gpu):
    """A block leaves its SM's 1 KiB; the memory is read in 5 to 500 ms."""
    assert gpu.smem_per_sm_bytes - gpu.smem_per_block_bytes == 1024
    assert gpu.registers_per_sm == 65536
    assert (gpu.tmem_columns == 512) == (100 <= gpu.cc < 120)
    assert 0.005 < gpu.hbm_bytes / gpu.hbm_bytes_per_s < 0.5
    assert 1e6 < gpu.l2_bytes < gpu.hbm_bytes


def test_a_driver_s_name_finds_its_product():
    got = from_device("NVIDIA H200", 90, 132, 150_000_000_000)
    assert (got.hbm_bytes_per_s, got.l2_bytes) == (4_800 * 10**9, 50 << 20)
    assert (got.name, got.hbm_bytes) == ("NVIDIA H200", 150_000_000_000)
    assert got.smem_per_block_bytes == 232_448
    # GH200 contains H200: the longest name wins.
    assert from_device("NVIDIA GH200 480GB", 90, 132, 1).hbm_bytes_per_s == 4_900 * 10**9
    slice_ = from_device("NVIDIA H200 MIG 1g.18gb", 90, 16, 18 << 30)
    assert slice_.num_sms == 16


def test_an_unnamed_product_has_its_architecture_s_limits():
    got = from_device("NVIDIA RTX A6000", 86, 84, 48 << 30)
    assert (got.smem_per_block_bytes, got.hbm_bytes_per_s, got.l2_bytes) == (101_376, 0, 0)
    with pytest.raises(Refused, match="compute capability 75"):
        from_device("Tesla T4", 75, 40, 16 << 30)
    assert 0 in ARCHITECTURES
