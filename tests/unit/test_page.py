"""HTML of a page with a document of a run; tests/browser opens pages."""

import json

import pytest

from fuligo.observability.viewer import front
from fuligo.page import Page

HARMFUL = ["<", ">", "&", "\u2028", "\u2029", "</script>", "<!--<script>", "]]>", "&lt;", "\\u003c", "\\<", "{{style}}"]


@pytest.mark.parametrize("text", [*HARMFUL, "".join(HARMFUL)])
def test_a_text_of_the_document_stays_text(text: str) -> None:
    document = json.dumps({text: [text]}, ensure_ascii=False)
    html = Page(front.__name__, ()).html("run", document)
    embedded = html.partition('id="document">')[2].partition("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(embedded)
    assert json.loads(embedded) == {text: [text]}
