"""What calls of some accounts get besides: rules for words, an announcement, a recording.

Made once for a line; knows the config, the recorder and the model's text. What any of them does is
in its own module.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.clock import NS_PER_MS, Clock
from appliance.lines import sip_announce
from appliance.lines.sip_announce import Announcing
from appliance.lines.sip_call import Extras
from appliance.lines.sip_config import SipAccount, SipConfig
from appliance.lines.sip_recorder import Recorded, Recorder, RecorderError
from appliance.lines.sip_words import Words
from appliance.lines.transcript import PiecesError, read_pieces
from appliance.lines.wav import WavError

logger = logging.getLogger(__name__)


class ExtrasMaker:
    """One line's. `use` comes first, and again when a box is found again."""

    def __init__(
        self, config: SipConfig, clock: Clock, recorded: Callable[[Recorded], None]
    ) -> None:
        """recorded: called by a thread. Raises `RecorderError`."""
        self.recorder: Recorder | None = None
        self._announcement: tuple[NDArray[np.float32], int] | None = None
        self._pieces: list[str] = []
        self._silent: tuple[int, ...] = ()
        self._accounts = config.accounts
        self._said: set[str] = set()
        self._has_words = any(account.words for account in config.accounts)
        if config.recording is not None and any(account.record for account in config.accounts):
            announce: Path | None = config.recording.announce
            if announce is not None:
                try:
                    self._announcement = sip_announce.read(announce)
                except WavError as err:
                    raise RecorderError(f"[sip.recording] announce: {err}") from None
            self.recorder = Recorder(config.recording, clock, recorded)

    def use(self, welcome: control.Welcome) -> None:
        """The model is this box's."""
        for why in mistakes(self._accounts, welcome):
            if why not in self._said:
                self._said.add(why)
                logger.warning("%s", why)
        if self.recorder is not None:
            self.recorder.frames(welcome.samples_per_frame, welcome.sample_rate_hz)
        if self._has_words:
            self._silent = welcome.silent_ids
            try:
                self._pieces = read_pieces(welcome.pieces)
            except PiecesError as err:
                logger.warning("rules for words do nothing: %s", err)

    def make(self, name: str, account: SipAccount) -> Extras:
        """For one call. name: of its recording."""
        words = None
        if account.words:
            grace_ns = account.words_grace_ms * NS_PER_MS
            words = Words(account.words, self._pieces, self._silent, grace_ns)
        if not account.record or self.recorder is None:
            return Extras(words)
        announcing = None
        if self._announcement is not None:
            announcing = Announcing(*self._announcement)
        return Extras(words, announcing, self.recorder.tape(name))

    def close(self) -> None:
        """Finish what is recorded."""
        if self.recorder is not None:
            self.recorder.close()


def mistakes(accounts: Iterable[SipAccount], welcome: control.Welcome) -> list[str]:
    """Accounts that the box will let nobody in for, and what to change. Pure.

    No reason not to start: others are taken, and another box may have other voices.
    """
    found = []
    for account in accounts:
        which = f'calls to account "{account.user}" will be refused'
        if account.persona.strip() and not welcome.takes_persona:
            found.append(
                f"{which}: {welcome.model} takes no persona in this box. Leave persona out, or "
                "serve a bundle that takes one; the box's log says if it lacks a tokenizer"
            )
        if account.voice and account.voice not in welcome.voices:
            names = ", ".join(welcome.voices)
            change = f"Its voices: {names}" if names else "It has none to choose from: leave it out"
            found.append(f'{which}: {welcome.model} has no voice "{account.voice}". {change}')
    return found
