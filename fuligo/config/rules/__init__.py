"""Rules on combinations of flags. A rule is a pure function of the config that yields violations."""
