"""Plan as a self-contained HTML page."""

import json
from typing import Any

from fuligo.page import Page

_PAGE = Page(
    __name__,
    scripts=(
        *("plan.js", "bar.js", "cluster_drawing.js", "inspector.js", "cluster.js", "stages.js"),
        *("memory.js", "step.js", "findings.js", "settings.js", "page.js"),
    ),
)


def plan_page(document: dict[str, Any]) -> str:
    """Return the page of a plan, given its `plan.plan_document`."""
    return _PAGE.html(f"{document['name']}: plan", json.dumps(document, separators=(",", ":")))
