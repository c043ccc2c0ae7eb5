"""What `engines show` says of memory is what the executor will lay out."""

from dataclasses import asdict

import msgspec

from engines import memory_shown
from engines.bundle import FileSpec
from engines.layout import plan_layout
from engines.program import plan_program
from tests.engines import toy


def test_what_is_shown_is_what_will_be_laid_out() -> None:
    manifest = toy.manifest()
    files = manifest.files | {"stages/weights/a.bin": FileSpec("0" * 64, 5_000_000)}
    wide = msgspec.structs.replace(
        manifest,
        files=files,
        regions=tuple(
            msgspec.structs.replace(
                region,
                shape=(1, 1 << 20, toy.WIDTH),
                clock=msgspec.structs.replace(region.clock, retain=1 << 20),
            )
            if region.name == "hear.ring"
            else region
            for region in manifest.regions
        ),
    )
    found = memory_shown.needs(wide)
    layout = plan_layout(wide, plan_program(wide), found.slots, memory_shown.PAGE_BYTES)
    assert layout.growing_bytes == found.slots * (8 << 20)
    assert found.full == 5_000_000 + layout.full_bytes(found.slots)
    assert found.session["full"] == 8 << 20
    assert found.session["10 s"] < found.session["full"]
    said = memory_shown.line(found)
    assert "weights 5.0 MB" in said
    assert "8.4 MB at full" in said
    assert set(asdict(found)) == {"slots", "weights", "whole", "session", "full"}
