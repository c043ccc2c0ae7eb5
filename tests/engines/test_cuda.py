"""The CUDA driver shell where there is no driver: it says so, and what to do."""

from __future__ import annotations

import ctypes
import ctypes.util
from types import SimpleNamespace
from typing import Any

import pytest

from engines import cuda


@pytest.mark.skipif(
    ctypes.util.find_library("cuda") is not None, reason="needs a machine without a CUDA driver"
)
def test_a_machine_without_cuda_is_told_so_in_one_sentence() -> None:
    with pytest.raises(cuda.NoCuda, match=r"(Run this on a machine with a GPU|pip install)"):
        cuda.Device()


def test_a_map_of_a_matrix_tells_the_driver_columns_before_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    words = (ctypes.c_uint64 * 16)(*range(16))
    asked: list[Any] = []

    class Driver:
        """The bindings' own names, without a driver behind them."""

        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

        def cuTensorMapEncodeTiled(self, *args: Any) -> tuple[int, SimpleNamespace]:
            asked.extend(args)
            return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(words))

    monkeypatch.setattr(cuda, "_driver", Driver())
    found = cuda.matrix_map(cuda.DevicePtr(4096), (48, 192), 400, (16, 64))
    assert list(found) == list(range(16))
    numbers = [[int(one) for one in group] for group in asked[3:7]]
    assert (asked[1:3], numbers) == ([2, 4096], [[192, 48], [400], [64, 16], [1, 1]])
