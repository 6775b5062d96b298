"""Sandbox of Linux namespaces for untrusted programs: launch scripts, and Python that a model wrote.

Its modules import the standard library only: they run in their own small processes (`processes.command`).
"""
