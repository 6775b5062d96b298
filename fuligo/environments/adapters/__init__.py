"""Environments, tasks and tools of other projects. Each module needs its own package, which an extra of the same name installs."""
