"""Bundles cut at attention reach real plans: every piece, each for one of three architectures.

The other pieces of a cut bundle (depth, a prompt's) are the very graphs of the whole one, whose
plans `test_tensorrt_build` builds; that they are the same is asked here. How the executor runs the
built-in stage between plans is `test_ring_cuda`'s.
"""

import pytest

from engines import plans
from engines.bundle import Bundle
from export.tensorrt_graph import prepare
from export.tensorrt_network import Wanted, build

tensorrt_rtx = pytest.importorskip("tensorrt_rtx")

pytestmark = pytest.mark.torch

CAPABILITIES = ("8.6", "8.9", "12.0")


def pieces(cut: Bundle, whole: Bundle) -> list[str]:
    """Stages whose graphs only the cut bundle has; all others are equal to the whole one's."""
    theirs = {s.name: whole.manifest.files[s.graph] for s in plans.graph_stages(whole.manifest)}
    ours = {s.name: cut.manifest.files[s.graph] for s in plans.graph_stages(cut.manifest)}
    same = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    return [name for name in ours if name not in same]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "largest_batch"), [("moshi", 2), ("personaplex", 1)])
def test_every_piece_is_planned_without_attention(
    model: str, largest_batch: int, request: pytest.FixtureRequest
) -> None:
    """Each is checked against its bundle before it is built: names, shapes, profiles, no rings."""
    names = {
        "moshi": ("ring_bundle", "micro_bundle"),
        "personaplex": ("persona_ring_bundle", "persona_bundle"),
    }
    cut, whole = (request.getfixturevalue(name) for name in names[model])
    found = pieces(cut, whole)
    rings = [stage for stage in cut.manifest.stages if stage.ring is not None]
    assert len(found) == len(rings) + 3, "one more than attentions in each cut stage"
    assert not {stage.name for stage in rings} & {
        stage.name for stage in plans.graph_stages(cut.manifest)
    }
    for index, name in enumerate(found):
        stage = next(s for s in cut.manifest.stages if s.name == name)
        prepared = prepare(cut.path, stage.graph, "inputs")
        assert prepared.attentions == frozenset()
        capability = CAPABILITIES[(index + (model == "moshi")) % len(CAPABILITIES)]
        wanted = Wanted(
            cut.path, stage, frozenset(), prepared, plans.exact(largest_batch), capability
        )
        made = build(tensorrt_rtx, wanted, lambda *_: None)
        assert made.attention == "none"
        assert made.plan.nbytes > 10_000, name
