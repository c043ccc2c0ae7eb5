"""A call from a script: say a WAV file, keep the answer.

python examples/scripted_call.py http://127.0.0.1:8998 said.wav answer.wav
"""

import asyncio
import sys

import numpy as np
import soundfile
import soxr

from appliance.lines.web_client import Heard, WebClient, Words


async def main(url: str, said: str, answer: str) -> None:
    pcm, rate_hz = soundfile.read(said, dtype="float32", always_2d=True)
    heard = [np.zeros(0, np.float32)]
    async with await WebClient.connect(url) as call:
        speaking = asyncio.create_task(call.say(soxr.resample(pcm[:, 0], rate_hz, 24_000)))
        speaking.add_done_callback(lambda _: asyncio.ensure_future(call.hang_up()))
        async for event in call:
            match event:
                case Heard():
                    heard.append(event.pcm)
                case Words():
                    sys.stdout.write(event.text)
    soundfile.write(answer, np.concatenate(heard), 24_000)


asyncio.run(main(*sys.argv[1:]))
