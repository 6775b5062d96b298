"""What a config would do to a cluster, found without one: rules, memory, layout, time, and a picture. Imports no torch."""
