"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# Nothing asserts on a timing, and a loaded machine is slow at any moment.
settings.register_profile("fuligo", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("full", settings.get_profile("fuligo"), max_examples=300)
settings.load_profile("fuligo")
