"""Environments, tasks and tools of other projects. Each module needs its project's package; all but verifiers have an extra for it."""
