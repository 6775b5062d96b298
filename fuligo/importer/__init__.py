"""Import of launch scripts: bash runs the script in a sandbox, stand-ins record the training job that it starts."""

from __future__ import annotations

from fuligo.importer.run import ImportedScript, import_script

__all__ = ["ImportedScript", "import_script"]
