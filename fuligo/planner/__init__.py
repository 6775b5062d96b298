"""Planner: rules, layout, memory and time of a run, computed from its config. Imports neither numpy nor torch."""
