"""Plans as a builder would record them, without one: for tests that only read what is recorded."""

from pathlib import Path

from engines import plans
from engines.bundle import ROWS, Bundle
from engines.plans import MadeFrom, Plan, Plans, Profile

VERSION = "1.7.1.116"
MOST_ROWS = 16
"""Of a prompt that a plan takes at once; few, so that tests need more than one run."""


def plans_of(bundle: Bundle, largest: int) -> Plans:
    """Plans of every stage for sm_89, as if built on another machine; there are no files."""
    manifest, made = bundle.manifest, []
    for stage in plans.graph_stages(manifest):
        symbols = {length for spec in stage.inputs for length in spec.shape}
        prompts = stage.name not in {ticking.name for ticking in manifest.stages}
        profiles = plans.exact(1 if prompts else largest)
        if ROWS in symbols:
            profiles = (Profile(1, MOST_ROWS, MOST_ROWS),)
        weights = {n: f.sha256 for n, f in manifest.files.items() if n.endswith(".bin")}
        made.append(
            Plan(
                stage=stage.name,
                file=f"{stage.name}.plan",
                sha256="0" * 64,
                bytes=5,
                inputs=stage.inputs,
                outputs=stage.outputs,
                weights=(),
                in_place=(),
                profiles=profiles,
                attention="none",
                made_from=MadeFrom(
                    graph_sha256=manifest.files[stage.graph].sha256,
                    constants=weights,
                    weights="inputs",
                    profiles=profiles,
                    version=VERSION,
                    recipe=1,
                ),
                seconds=1.0,
                peak_rss_bytes=1,
            )
        )
    return Plans(
        format=plans.FORMAT,
        target="sm_89",
        compute_capability="8.9",
        gpu="NVIDIA L4",
        platform="linux-x86_64",
        flavour="tensorrt_rtx",
        version=VERSION,
        checkpoint_sha256=manifest.model.checkpoint_sha256,
        plans=tuple(made),
    )


def write(bundle: Bundle, recorded: Plans) -> Path:
    """Write plans.json and a file of 5 bytes per plan; return their folder."""
    folder = bundle.path / plans.FOLDER / recorded.target
    plans.write(folder, recorded)
    for plan in recorded.plans:
        (folder / plan.file).write_bytes(b"plan\n")
    return folder
