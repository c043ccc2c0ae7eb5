"""A real plan of another flavour and GPU: what a box must refuse whatever its plans.json says.

`foreign.plan.xz` is a plan of one activation, built by tensorrt_rtx 1.7.1.116 for sm_89. Made, if
ever again, by `python -m tests.engines.foreign_plan`, on any machine with duplexbox[tensorrt].
"""

import lzma
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("foreign.plan.xz")


def read() -> bytes:
    """The plan's bytes."""
    return lzma.decompress(FILE.read_bytes())


def make(trt: Any) -> bytes:
    """Build it with the module tensorrt_rtx."""
    from export.tensorrt_network import nothing_collected

    with nothing_collected():
        return _make(trt)


def _make(trt: Any) -> bytes:
    class Sink(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            assert severity > trt.ILogger.Severity.ERROR, message

    sink = Sink()
    builder = trt.Builder(sink)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    pcm = network.add_input("pcm", trt.float32, (4,))
    heard = network.add_activation(pcm, trt.ActivationType.RELU).get_output(0)
    heard.name = "heard"
    network.mark_output(heard)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    assert config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    return bytes(memoryview(builder.build_serialized_network(network, config)))


if __name__ == "__main__":
    import tensorrt_rtx

    FILE.write_bytes(lzma.compress(make(tensorrt_rtx), preset=9 | lzma.PRESET_EXTREME))
