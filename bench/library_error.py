# ruff: noqa: T201  (a script run by hand)
"""Error of ring attention and of PyTorch's attention kernels, on the same bits, against float64.

    python -m bench.library_error            # on a GPU, with torch for CUDA

Both read the same bfloat16 rings of 3000 rows and the same bfloat16 query, unrotated. Printed per
backend: ‖out - expected‖ / ‖expected‖ with bfloat16 output, and the largest error of one element.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from engines.kernels import ring_reference as ref
from engines.kernels.ring_attention import CacheType, RingShape
from tests.engines.kernels.ring_rig import RingRig, random_case

BATCH, HEADS, DIM, ROWS = 4, 32, 128, 3000


def main() -> None:
    rig = RingRig()
    shape = RingShape(CacheType.BFLOAT16, HEADS, HEADS, DIM, capacity=ROWS)
    for size in (1.0, 4.0):
        rng = np.random.default_rng(0)
        ages = np.full(BATCH, ROWS)
        case = random_case(rng, shape, ages, slots=BATCH, rotated=False, size=size)
        bits, k_cache, v_cache = rig.run(case, None)
        expected = case.expected(k_cache, v_cache)[:, 0]

        def report(
            name: str, out: np.ndarray, size: float = size, expected: np.ndarray = expected
        ) -> None:
            error = out - expected
            relative = np.linalg.norm(error) / np.linalg.norm(expected)
            print(f"|q| x {size:g}  {name:20} {relative:.3e}  worst {np.abs(error).max():.3e}")

        report("ring_attention", ref.bf16_values(bits)[:, 0].astype(np.float64))
        report("rounding alone", ref.bf16_values(ref.bf16_bits(expected)).astype(np.float64))

        def tensor(stored: np.ndarray, slots: np.ndarray = case.slots) -> torch.Tensor:
            rows = stored.reshape(BATCH, ROWS, HEADS, DIM)[slots]
            values = torch.from_numpy(ref.bf16_values(rows)).cuda().to(torch.bfloat16)
            return values.transpose(1, 2).contiguous()

        query = torch.from_numpy(case.q).cuda().to(torch.bfloat16).transpose(1, 2)
        for backend in (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.MATH,
        ):
            try:
                with sdpa_kernel(backend):
                    out = scaled_dot_product_attention(query, tensor(k_cache), tensor(v_cache))
            except RuntimeError as err:
                print(f"{backend.name}: not run: {str(err).splitlines()[0][:80]}")
                continue
            report(backend.name, out[:, :, 0].double().cpu().numpy())


if __name__ == "__main__":
    main()
