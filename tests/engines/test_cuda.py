"""The CUDA driver shell where there is no driver: it says so, and what to do."""

from __future__ import annotations

import ctypes.util

import pytest

from engines import cuda


@pytest.mark.skipif(
    ctypes.util.find_library("cuda") is not None, reason="needs a machine without a CUDA driver"
)
def test_a_machine_without_cuda_is_told_so_in_one_sentence() -> None:
    with pytest.raises(cuda.NoCuda, match=r"(Run this on a machine with a GPU|pip install)"):
        cuda.Device()
