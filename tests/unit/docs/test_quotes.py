"""Test that files quoted in full on a page equal the quote."""

import re

from tests.unit.docs.pages import PAGES, REPOSITORY, page_name

QUOTE = re.compile(r"^All of `([^`]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_whole_files_are_quoted_to_the_letter() -> None:
    quotes = [(page_name(page), *quote) for page in PAGES for quote in QUOTE.findall(page.read_text())]
    assert quotes
    for page, path, text in quotes:
        assert text == (REPOSITORY / path).read_text(), f"{page} shows another {path}"
