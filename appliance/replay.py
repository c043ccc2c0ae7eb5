"""`duplexbox appliance replay`: run a recorded call again and compare it, frame by frame.

From the ledger's file comes what the box decided on every tick: which frames ran, in which slot of
which batch, what was skipped and what was concealed. From the line's journal come the frames the
caller said and checksums of what came back. `plan` joins the two, purely; `run` steps an engine
through it from the call's first frame, since state is the sum of what went before, and compares
text and audio bit for bit.

A state begins with the call, and once more wherever it was reset; with a voice or a persona, the
prompt is made again from the words in the ledger's file, must have the hash the journal has, and is
fed in the pieces it was fed in then, since the last bits of a product depend on its number of rows.

On the CPU executor equal means equal to the last bit, and does not depend on who else was in the
batch; here the other rows are sessions that hear silence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from appliance.control import Prompted
from appliance.journal import Journal, checksum
from appliance.ledger import Call, Flag
from appliance.persona import Personas
from engines.bundle import Bundle
from engines.executor import Executor, Primes
from engines.prefill import Prompt


class ReplayError(ValueError):
    """The call cannot be replayed from what there is; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Begin:
    """How a state began."""

    prompt: Prompted | None
    """The prompt it was fed, and in which pieces; None: it began with nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One tick of the call that ran."""

    index: int
    """Frame of the call, from 0."""
    batch: int
    slot: int
    pcm: NDArray[np.float32] | None
    """What the model heard; None: silence."""
    text: int
    """What it said beside the frame, as the ledger has it; -1 while its delays were filling."""
    checksum: int | None
    """Of the frame it made; None when the line never had it in hand."""
    begins: Begin | None = None
    """The state is a new one before it."""


@dataclass(slots=True)
class Comparison:
    """What came of a replay. Counts are frames of the chosen stretch."""

    frames: int = 0
    text_equal: int = 0
    audio_compared: int = 0
    audio_equal: int = 0
    first_difference: int | None = None
    """Index of the first frame that differs."""
    differing: list[int] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return self.first_difference is None and self.frames > 0


def plan(call: Call, journal: Journal) -> list[Step]:
    """Every tick of the call that ran, in order. Pure. Raises `ReplayError`."""
    header, head = call.header, journal.head
    if (header.session, header.generation, header.t0_ns) != (
        head.session,
        head.generation,
        head.t0_ns,
    ):
        raise ReplayError(
            f"{journal.path} is of session {head.session} on another grid than session "
            f"{header.session} of {call.path}; name the journal of the same call"
        )
    if (header.voice or header.persona) and head.prompt is None:
        raise ReplayError(f"{journal.path} does not say how the call's prompt was fed")
    indices = call.ticks["index"]
    if not len(indices) or (indices != np.arange(len(indices))).any():
        raise ReplayError(f"{call.path} lacks records of some frames, so its state is unknown")
    steps: list[Step] = []
    taken = 0
    begins: Begin | None = Begin(head.prompt)
    for record in call.ticks:
        index, flags = int(record["index"]), int(record["flags"])
        taken += int(record["skipped"])
        # captured_ns is set exactly when the tick took a frame of the caller, heard or not.
        takes = bool(flags & (Flag.HEARD | Flag.BAD_INPUT)) or int(record["captured_ns"]) != 0
        if takes and taken >= len(journal.said):
            raise ReplayError(
                f"{journal.path} ends before frame {index} of the call: it holds "
                f"{len(journal.said)} of the caller's frames"
            )
        said = journal.said[taken] if takes else None
        taken += takes
        if flags & Flag.RESET:
            begins = _restart(call, journal, index)
        if flags & (Flag.MISSED | Flag.FAULT | Flag.PRIMING):
            continue
        heard = journal.heard.get(index)
        if heard is not None and heard.heard >= 0 and (said is None or said.index != heard.heard):
            raise ReplayError(
                f"frame {index}: the journal says that the model heard frame {heard.heard} of the "
                f"caller, the ledger that it was {said.index if said else 'silence'}"
            )
        steps.append(
            Step(
                index=index,
                batch=int(record["batch"]),
                slot=int(record["slot"]),
                pcm=said.pcm if said is not None and flags & Flag.HEARD else None,
                text=int(record["text"]),
                checksum=heard.checksum if heard is not None else None,
                begins=begins,
            )
        )
        begins = None
    return steps


def _restart(call: Call, journal: Journal, index: int) -> Begin:
    has_prompt = bool(call.header.voice or call.header.persona)
    prompt = journal.restarts.get(index)
    if has_prompt and prompt is None:
        raise ReplayError(
            f"{journal.path} does not say how the prompt was fed when the model began anew before "
            f"frame {index}; compare what comes before it: --to "
            f"{index * call.header.period_ns / 1e9:.2f}s"
        )
    return Begin(prompt)


def run(
    executor: Executor,
    call: Call,
    steps: list[Step],
    first: int,
    last: int,
    hear: Callable[[NDArray[np.float32]], None] | None = None,
) -> Comparison:
    """Step ``executor`` through the call; compare frames ``first`` to ``last``, both included.

    hear: is given each frame of the stretch, (S,) float32, before the next step overwrites it.
    Raises `ReplayError`, and whatever breaks the engine.
    """
    manifest = executor.bundle.manifest
    if manifest.model.checkpoint_sha256 != call.header.checkpoint_sha256:
        raise ReplayError(
            f"{executor.bundle.path} was made of checkpoint "
            f"{manifest.model.checkpoint_sha256[:12]}, the call ran on "
            f"{call.header.checkpoint_sha256[:12]}; name the bundle it ran on: --bundle DIR"
        )
    largest = max((step.batch for step in steps), default=0)
    if largest > executor.slots:
        raise ReplayError(
            f"the call ran in batches of up to {largest}; this engine has {executor.slots} slots"
        )
    for slot in range(largest):
        executor.join(slot, {})
    prompt = _prompt(executor.bundle, call) if any(_fed(step) for step in steps) else None
    found = Comparison()
    slot = -1
    for step in steps:
        if step.index > last:
            break
        if step.begins is not None:
            if slot >= 0:
                executor.join(slot, {})
            slot = step.slot
            _begin(executor, slot, step.begins, call, prompt)
        elif slot != step.slot:
            executor.move(slot, step.slot)
            executor.join(slot, {})
            slot = step.slot
        executor.audio_in[: step.batch] = 0
        if step.pcm is not None:
            executor.audio_in[slot] = step.pcm
        executor.step(step.batch)
        if step.index >= first:
            _compare(found, step, executor, slot)
            if hear is not None:
                hear(executor.audio_out[slot])
    return found


def _fed(step: Step) -> Prompted | None:
    return step.begins.prompt if step.begins is not None else None


def _prompt(bundle: Bundle, call: Call) -> Prompt:
    """The prompt of the call's words, made again. Raises `BundleError`, too."""
    prompt = Personas(bundle).prepare(call.header.voice, call.header.persona)
    if not isinstance(prompt, Prompt):
        why = prompt.detail if prompt is not None else "it names neither voice nor persona"
        raise ReplayError(f"{call.path}: its prompt cannot be made again: {why}")
    return prompt


def _begin(executor: Executor, slot: int, begin: Begin, call: Call, prompt: Prompt | None) -> None:
    """Make ``slot`` what the session was before the first step on a new state."""
    settings, fed = call.header.settings, begin.prompt
    if fed is None:
        executor.join(slot, settings)
        return
    assert prompt is not None, slot
    if fed.key != prompt.key:
        raise ReplayError(
            f"{call.path}: voice and persona make another prompt in {executor.bundle.path} "
            f"({prompt.key[:12]}) than the call was fed ({fed.key[:12]}); name the bundle it ran "
            f"on: --bundle DIR"
        )
    if sum(fed.fed) != prompt.shared_rows or not isinstance(executor, Primes):
        raise ReplayError(
            f"{call.path}: {sum(fed.fed)} rows of its prompt of {prompt.rows} are accounted for"
        )
    primer = executor.primer()
    primer.clear(slot)
    first = 0
    for rows in fed.fed:
        primer.feed(slot, prompt, first, rows)
        first += rows
    primer.settle(slot, slot, settings, primer.open(slot, prompt, settings))


def _compare(found: Comparison, step: Step, executor: Executor, slot: int) -> None:
    text = int(executor.text[slot]) if executor.valid[slot] else -1
    same_text = text == step.text
    same_audio = True
    found.frames += 1
    found.text_equal += same_text
    if step.checksum is not None:
        same_audio = checksum(executor.audio_out[slot]) == step.checksum
        found.audio_compared += 1
        found.audio_equal += same_audio
    if not (same_text and same_audio):
        found.differing.append(step.index)
        if found.first_difference is None:
            found.first_difference = step.index


def frames_between(
    period_ns: int, from_s: float | None, to_s: float | None, frames: int
) -> tuple[int, int]:
    """The first and the last frame of a stretch of seconds; None: from the start, to the end.

    Raises `ReplayError` when no frame lies in it.
    """
    first = 0 if from_s is None else int(from_s * 1e9 // period_ns)
    last = frames - 1 if to_s is None else min(frames - 1, int(-(-to_s * 1e9 // period_ns)) - 1)
    if not 0 <= first <= last:
        length_s = frames * period_ns / 1e9
        raise ReplayError(
            f"no frame lies between --from and --to: the call lasted {length_s:.2f} s"
        )
    return first, last


def text(found: Comparison, period_ns: int) -> list[str]:
    """The comparison in two lines."""
    lines = [
        f"{found.frames} frames replayed: text equal in {found.text_equal}, audio equal to the "
        f"last bit in {found.audio_equal} of {found.audio_compared} that the line had in hand"
    ]
    if found.first_difference is not None:
        at_s = found.first_difference * period_ns / 1e9
        lines.append(
            f"DIFFERS: {len(found.differing)} frames, the first is {found.first_difference} "
            f"at {at_s:.2f} s"
        )
    return lines
