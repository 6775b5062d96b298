"""The plan as one page that needs nothing else: markup, style, scripts and the plan's JSON in one file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import Any

_SCRIPTS = (
    "dom.js",
    "tooltip.js",
    "plan.js",
    "bar.js",
    "cluster_drawing.js",
    "inspector.js",
    "cluster.js",
    "stages.js",
    "memory.js",
    "step.js",
    "findings.js",
    "settings.js",
    "page.js",
)
"""In the order in which they build on each other; together they are one module."""


def plan_page(document: dict[str, Any]) -> str:
    """
    Args:
        document: of `json_output.plan_document`. Names in it may be anything: they are shown, never run.
    """
    style = _source("page.css")
    script = "\n".join(_source(name) for name in _SCRIPTS)
    parts = {
        "policy": _content_security_policy(style, script),
        "title": html.escape(document["name"]),
        "style": style,
        "script": script,
        "data": _json_in_html(document),
    }
    first, *rest = _source("page.html").split("{{")
    pieces = [first]
    for piece in rest:
        name, text = piece.split("}}", 1)
        pieces += [parts[name], text]
    return "".join(pieces)


def _content_security_policy(style: str, script: str) -> str:
    """The browser runs this page's own script and style, and loads nothing: a second wall behind the escaping."""
    own = f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    return f"default-src 'none'; img-src data:; {own}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json_in_html(document: dict[str, Any]) -> str:
    """JSON without the characters that could end the element or begin a tag; they are escaped as JSON has it."""
    text = json.dumps(document, separators=(",", ":"))  # ASCII only: also no line separators, which older parsers trip over
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _source(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
