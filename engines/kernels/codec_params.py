"""The codec's launches and their arguments, field by field as codec.cu has them.

Addresses are 64 bits. What a field means is said there. For products: `codec_gemm.GemmParams`.
"""

import ctypes
from dataclasses import dataclass

from engines.cuda import LaunchShape

MOST_WINDOWS = 24
MOST_LEVELS = 32


class KeptWindow(ctypes.Structure):
    _fields_ = [
        ("current", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("buffer", ctypes.c_uint64),
        ("channels", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("session", ctypes.c_int),
        ("tail_row", ctypes.c_int),
    ]


class WindowParams(ctypes.Structure):
    _fields_ = [
        ("windows", KeptWindow * MOST_WINDOWS),
        ("live", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("position_next", ctypes.c_uint64),
        ("advance", ctypes.c_int),
    ]


class SoundParams(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_uint64) for n in "sound w bias out out_elu kept kept_next live".split()],
        *[(n, ctypes.c_int) for n in "steps channels kernel elu_session".split()],
    ]


class RowsParams(ctypes.Structure):
    _fields_ = [
        *[
            (name, ctypes.c_uint64)
            for name in (
                "parts bias scale add x normed gain shift kept kept_next front w position "
                "position_next live"
            ).split()
        ],
        *[(n, ctypes.c_int) for n in "count channels steps total_rows x_session".split()],
        ("eps", ctypes.c_float),
    ]


class BookParams(ctypes.Structure):
    _fields_ = [
        ("books", ctypes.c_uint64 * MOST_LEVELS),
        ("squared", ctypes.c_uint64 * MOST_LEVELS),
        *[(n, ctypes.c_uint64) for n in "left codes best best_at arrivals".split()],
        *[(n, ctypes.c_int) for n in "level levels bins features sessions blocks".split()],
    ]


@dataclass(frozen=True, slots=True)
class Call:
    """One launch."""

    kernel: str
    shape: LaunchShape
    params: ctypes.Structure
    label: str
