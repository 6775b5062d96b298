"""Sandbox of Linux namespaces for programs that nobody has read: launch scripts, and Python that a model wrote.

Its modules import the standard library only: they run in their own small processes (`processes.command`).
"""
