"""CUDA C++ to machine code, at export time or in a test, with no GPU and no CUDA toolkit.

Decides how our kernels are compiled: C++17, only headers that lie beside the source, the target's
own machine code (cubin) and PTX for newer devices. Does not know what the source does.

Needs ``cuda-bindings`` and the ``nvidia-cuda-nvrtc`` wheel, both 13.0: newer ones emit PTX that a
CUDA 13.0 driver may refuse. Our sources include nothing of the toolkit, so no other wheel.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
"""What export compiles for when it is not told: A100, A10/RTX 30, L4/RTX 40, H100/H200, RTX 50."""


class NoCompiler(Exception):
    """NVRTC is not installed on this machine: the operator's to fix."""


class DoesNotCompile(Exception):
    """NVRTC refused a kernel: ours to fix. The compiler's log is in the text."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel source for one target and one set of definitions."""

    target: str
    cubin: bytes
    ptx: bytes
    log: str


@dataclass(frozen=True, slots=True)
class Job:
    """Something to compile."""

    source: Path
    definitions: Mapping[str, str | int]
    target: str


def compile_source(source: Path, definitions: Mapping[str, str | int], target: str) -> Compiled:
    """Compile ``source`` for ``target`` ("sm_90"), headers taken from its folder.

    Raises NoCompiler, DoesNotCompile.
    """
    nvrtc = _load_nvrtc()
    headers = sorted(source.parent.glob("*.cuh"))
    options = [f"--gpu-architecture={target}", "--std=c++17", "--diag-suppress=128"]
    options += [f"-D{name}={value}" for name, value in sorted(definitions.items())]
    program = _check(
        nvrtc,
        "nvrtcCreateProgram",
        source.read_bytes(),
        source.name.encode(),
        len(headers),
        [h.read_bytes() for h in headers],
        [h.name.encode() for h in headers],
    )
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
        log = _read(nvrtc, "ProgramLog", program).rstrip(b"\0").decode()
        if int(status) != 0:
            raise DoesNotCompile(
                f"{source.name} does not compile for {target} with {dict(definitions)}:\n{log}"
            )
        cubin = _read(nvrtc, "CUBIN", program)
        ptx = _read(nvrtc, "PTX", program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(target, cubin, ptx, log)


def compile_cached(
    source: Path, definitions: Mapping[str, str | int], target: str, folder: Path
) -> bytes:
    """The cubin, from ``folder`` if the same text was compiled there before.

    The file's name is a hash of the sources, the definitions and the target, so a stale one is
    never found. Does not need NVRTC when the file exists.
    """
    digest = hashlib.sha256(repr((target, sorted(definitions.items()))).encode())
    for path in (source, *sorted(source.parent.glob("*.cuh"))):
        digest.update(path.read_bytes())
    cubin = folder / f"{source.stem}-{target}-{digest.hexdigest()[:20]}.cubin"
    if cubin.exists():
        return cubin.read_bytes()
    compiled = compile_source(source, definitions, target).cubin
    with contextlib.suppress(OSError):  # a folder nobody may write to costs seconds at each start
        folder.mkdir(parents=True, exist_ok=True)
        part = cubin.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(compiled)
        part.rename(cubin)
    return compiled


def compile_all(jobs: Iterable[Job], folder: Path) -> None:
    """`compile_cached` of every job at once, on all cores. Raises NoCompiler, DoesNotCompile."""
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        waiting = [
            workers.submit(compile_cached, job.source, job.definitions, job.target, folder)
            for job in jobs
        ]
        for job in waiting:
            job.result()


def is_installed() -> bool:
    """True where `compile_source` can run."""
    try:
        _load_nvrtc()
    except NoCompiler:
        return False
    return True


def compiler_version() -> tuple[int, int]:
    """NVRTC's (major, minor). Raises NoCompiler."""
    major, minor = _check(_load_nvrtc(), "nvrtcVersion")
    return int(major), int(minor)


def _load_nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as err:
        raise NoCompiler(
            f"{err}. Install the compiler: pip install 'duplexbox[cuda]' "
            "(cuda-bindings and nvidia-cuda-nvrtc, both 13.0)"
        ) from None
    return nvrtc


def _check(nvrtc: Any, name: str, *args: Any) -> Any:
    status, *values = getattr(nvrtc, name)(*args)
    if int(status) != 0:
        raise DoesNotCompile(f"{name} failed: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _read(nvrtc: Any, what: str, program: Any) -> bytes:
    size = int(_check(nvrtc, f"nvrtcGet{what}Size", program))
    # Written into by NVRTC, so never a bytes object: an empty log has size 1, and Python keeps one
    # `b" "` for the whole process, which was then `b"\0"` for everybody else.
    out = bytearray(size)
    status = getattr(nvrtc, f"nvrtcGet{what}")(program, out)[0]
    if int(status) != 0:
        raise DoesNotCompile(f"nvrtcGet{what} failed: {status.name}")
    return bytes(out)
