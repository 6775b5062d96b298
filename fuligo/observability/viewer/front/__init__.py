"""Markup, style and scripts of the page; `page.py` puts them together."""
