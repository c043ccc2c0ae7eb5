"""Speakers of espeak-ng that nobody has written down: their throats and manners drawn from a seed.

espeak-ng's own variants differ in pitch more than in formants, and most of what the model heard
wrongly was of variants whose formants lie where no voice of its training had them. A drawn one has
formants of a length of its own, each a little off, and its own pitch, roughness, breath and tone.

espeak-ng looks for variants in its data folder alone, so `data_folder` is one that has everything
by links and these besides. Not here: who of them speaks, and how fast (`voices`).
"""

import random
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FORMANTS = 9
LENGTH = (0.84, 1.2)
"""Of all formants together, against espeak-ng's own man; 1.2 is a child's."""
OFF = 0.06
"""Deviation of one formant from that."""
PITCH_HZ = (70, 235)
"""The lower end of a voice's melody; espeak-ng's own man has 82."""
VARIANTS = "voices/!v"


def drawn(seed: str) -> str:
    """The text of a variant."""
    rng = random.Random(seed)
    low = PITCH_HZ[0] * (PITCH_HZ[1] / PITCH_HZ[0]) ** rng.random()
    # A high voice mostly comes of a short throat, but not always.
    length = 0.5 * (rng.uniform(*LENGTH) + LENGTH[0] + (LENGTH[1] - LENGTH[0]) * (low - 70) / 165)
    lines = ["language variant", "name drawn", f"gender {'female' if low > 140 else 'male'}"]
    lines.append(f"pitch {low:.0f} {low * rng.uniform(1.2, 1.7):.0f}")
    for formant in range(FORMANTS):
        place = 100 * length * rng.gauss(1, OFF)
        lines.append(
            f"formant {formant} {place:.0f} {rng.gauss(100, 15):.0f} {rng.gauss(110, 20):.0f}"
        )
    lines.append(f"flutter {rng.randint(0, 4)}")
    lines.append(f"roughness {rng.randint(0, 4)}")
    lines.append(f"voicing {rng.randint(60, 120)}")
    lines.append(f"consonants {rng.randint(60, 130)} {rng.randint(60, 130)}")
    lines.append(f"intonation {rng.randint(1, 3)}")
    if rng.random() < 0.4:
        breath = " ".join(str(rng.randint(0, 4)) for _ in range(8))
        lines.append(f"breath {breath}")
    if rng.random() < 0.6:
        tones = (600, rng.randint(120, 255), 1_200, rng.randint(20, 150), 2_000, 40)
        lines.append("tone 100 255 " + " ".join(map(str, tones)))
    return "\n".join(lines) + "\n"


@cache
def data_folder(seeds: tuple[str, ...]) -> Path:
    """A folder for espeak-ng's ``--path`` that knows the variants of ``seeds`` by those names."""
    ran = subprocess.run(["espeak-ng", "--version"], check=True, capture_output=True, text=True)
    place = re.search(r"Data at: (.*)", ran.stdout)
    if place is None:
        raise OSError(f"espeak-ng does not say where its data is: {ran.stdout!r}")
    own = Path(place[1].strip())
    folder = Path(tempfile.mkdtemp(prefix="espeak-"))
    data = folder / "espeak-ng-data"
    (data / VARIANTS).mkdir(parents=True)
    for entry in own.iterdir():
        if entry.name != "voices":
            (data / entry.name).symlink_to(entry)
    for seed in seeds:
        (data / VARIANTS / seed).write_text(drawn(seed), encoding="ascii")
    return folder
