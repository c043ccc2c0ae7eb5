"""What holds for all tests: how long an example takes says nothing of whether it is right.

The first draw of text in a fresh clone computes tables of Unicode for seconds, and a busy machine
takes as long for anything; Hypothesis takes both for a fault of the strategy.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
