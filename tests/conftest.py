"""What every test may use, and how random ones are run.

A random test that fails prints what reproduces it (``@reproduce_failure``, the smallest example).
``HYPOTHESIS_PROFILE=ci`` tries harder; ``=thorough`` is for a night.
"""

import os

from hypothesis import HealthCheck, settings

_COMMON = settings(
    deadline=None,  # a slow machine is not a bug
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("default", _COMMON, max_examples=60)
settings.register_profile("ci", _COMMON, max_examples=200)
settings.register_profile("thorough", _COMMON, max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
