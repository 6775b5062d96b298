"""Page of `fuligo view`, as sent by the server or as a report: markup, style and scripts."""

from typing import Any

import orjson

from fuligo.page import Page

_SCRIPTS = (
    "numbers.js", "address.js", "source.js", "state.js", "controls.js", "curves.js", "chart.js", "run_settings.js", "overview.js",
    "charts_grid.js", "sample_list.js", "token_view.js", "episode_view.js", "sample_view.js", "samples.js", "prompts.js", "timeline.js",
    "time.js", "health.js", "page.js",
)  # fmt: skip


def page(title: str, document: dict[str, Any] | None = None) -> str:
    """Return the viewer's page as one HTML document. `document`: everything that a report shows; None for a page that asks its server."""
    return Page(__name__, _SCRIPTS, asks_server=document is None).html(title, orjson.dumps(document).decode())
