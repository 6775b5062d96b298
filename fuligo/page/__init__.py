"""Self-contained pages: markup, style, scripts and data in one file, for `fuligo plan --html` and `fuligo view`."""

import base64
import hashlib
import html
from dataclasses import dataclass
from importlib import resources

_SCRIPTS = ("dom.js", "tooltip.js", "theme.js")
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that could end the element, begin a tag, or confuse an old parser."""


@dataclass(frozen=True, slots=True)
class Page:
    """Parts that one page adds to the shared frame, style and scripts."""

    package: str
    """Package with `body.html`, `page.css` and the scripts."""
    scripts: tuple[str, ...]
    """Scripts in the order of their dependencies; together with the shared ones they form one module."""
    asks_server: bool = False
    """True if the page may send requests to its server."""

    def html(self, title: str, document: str) -> str:
        """Return the whole page as HTML. The scripts see `document` (JSON) as `embedded`; it is escaped, so that no text in it is run."""
        style = _source(__name__, "page.css") + _source(self.package, "page.css")
        script = "\n".join([*(_source(__name__, name) for name in _SCRIPTS), *(_source(self.package, name) for name in self.scripts)])
        parts = {
            "policy": self._content_security_policy(style, script),
            "title": html.escape(title),
            "style": style,
            "script": script,
            "body": _source(self.package, "body.html"),
            "data": _escaped(document),
        }
        first, *rest = _source(__name__, "frame.html").split("{{")
        pieces = [first]
        for piece in rest:
            name, text = piece.split("}}", 1)
            pieces += [parts[name], text]
        return "".join(pieces)

    def _content_security_policy(self, style: str, script: str) -> str:
        """Return a policy that admits only this page's style, script and requests to its server, in case escaping misses a character."""
        own = f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
        connect = "connect-src 'self'" if self.asks_server else "connect-src 'none'"
        return f"default-src 'none'; img-src data:; {own}; {connect}; base-uri 'none'; form-action 'none'"


def _escaped(document: str) -> str:
    for character, escape in _ESCAPES.items():
        document = document.replace(character, escape)  # on long texts many times as fast as `translate`
    return document


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _source(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
