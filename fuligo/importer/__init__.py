"""Reads a bash launch script and says which run it would start. Evaluates the script itself: no shell, no process, no file written."""

from __future__ import annotations

from fuligo.importer.run import ImportedScript, import_script

__all__ = ["ImportedScript", "import_script"]
