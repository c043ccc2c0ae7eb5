"""The compiler's thin shell."""

from pathlib import Path

import pytest

from engines.kernels import nvrtc

needs_compiler = pytest.mark.skipif(
    not nvrtc.is_installed(), reason="needs cuda-bindings and nvidia-cuda-nvrtc 13.0 (dev extra)"
)


@needs_compiler
def test_an_empty_log_leaves_the_space_of_everybody_else_alone(tmp_path: Path) -> None:
    """Its buffer has one byte, and Python has one object for each bytes of one byte."""
    source = tmp_path / "quiet.cu"
    source.write_text('extern "C" __global__ void quiet(int *out) { *out = 1; }\n')
    compiled = nvrtc.compile_source(source, {}, "sm_90")
    assert compiled.log == ""
    assert compiled.cubin.startswith(b"\x7fELF")
    assert b"a b"[1:2][0] == ord(" ")
