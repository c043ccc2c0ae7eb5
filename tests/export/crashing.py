"""Stands where TensorRT would be imported, and takes its process down as a fault in it would."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
