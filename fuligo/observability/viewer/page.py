"""The page: markup, style and scripts in one file, as the server sends it and as a report carries it."""

from __future__ import annotations

import base64
import hashlib
import html
from importlib import resources
from typing import Any

import orjson

_FRONT = "fuligo.observability.viewer.front"
SHARED_SCRIPTS = ("dom.js", "tooltip.js")
"""Of the page of `fuligo plan`."""
SCRIPTS = (
    "numbers.js",
    "address.js",
    "source.js",
    "state.js",
    "controls.js",
    "curves.js",
    "chart.js",
    "overview.js",
    "charts_grid.js",
    "sample_list.js",
    "token_view.js",
    "sample_view.js",
    "samples.js",
    "timeline.js",
    "time.js",
    "health.js",
    "page.js",
)
"""In the order in which they build on each other; together they are one module."""


def page(title: str, document: dict[str, Any] | None = None) -> str:
    """
    Args:
        title: of the window.
        document: everything the page shows, for one that asks no server; names and texts in it may be anything: they are shown, never run.
    """
    style = _source(_FRONT, "page.css")
    script = "\n".join([*(_source("fuligo.planner.html", name) for name in SHARED_SCRIPTS), *(_source(_FRONT, name) for name in SCRIPTS)])
    parts = {
        "policy": content_security_policy(style, script, asks=document is None),
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": "null" if document is None else _json_in_html(document),
    }
    first, *rest = _source(_FRONT, "page.html").split("{{")
    pieces = [first]
    for piece in rest:
        name, text = piece.split("}}", 1)
        pieces += [parts[name], text]
    return "".join(pieces)


def content_security_policy(style: str, script: str, *, asks: bool) -> str:
    """The browser runs this page's own script and style, and asks nobody but its server: a second wall behind the escaping."""
    own = f"style-src '{_digest(style)}'; script-src '{_digest(script)}'; connect-src {chr(39)}{'self' if asks else 'none'}{chr(39)}"
    return f"default-src 'none'; img-src data:; {own}; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def _json_in_html(document: dict[str, Any]) -> str:
    """JSON without the characters that could end the element or begin a tag; they are escaped as JSON has it."""
    text = orjson.dumps(document).decode()
    for character, escaped in _ESCAPES.items():
        text = text.replace(character, escaped)
    return text


def _source(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
