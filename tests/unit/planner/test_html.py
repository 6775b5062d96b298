"""The page is self-contained, and content of the plan cannot inject markup. tests/browser covers its behavior."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from importlib import resources

from fuligo.config import Config
from fuligo.planner import html
from fuligo.planner.html import plan_page
from fuligo.planner.plan import plan_document
from tests.unit.planner.hand_made_plans import plan_of_8, plan_of_256

DATA = re.compile(r'<script type="application/json" id="document">(.*?)</script>', re.DOTALL)


def page_of(name: str) -> str:
    return plan_page(plan_document(replace(plan_of_8(), name=name), Config()))


def test_the_page_carries_the_whole_document():
    document = plan_document(plan_of_256(), Config())
    match = DATA.search(plan_page(document))
    assert match is not None
    assert json.loads(match[1]) == document


def test_names_cannot_end_their_element():
    name = "</script></title><script>alert(1)</script> {{script}} <!-- &"
    page = page_of(name)
    assert page.count("<script") == page_of("glm4-9b").count("<script")
    match = DATA.search(page)
    assert match is not None
    assert json.loads(match[1])["name"] == name


def test_scripts_and_styles_run_by_their_digest_only():
    page = page_of("glm4-9b")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    for kind, pattern in (("script-src", r'<script type="module">(.*?)</script>'), ("style-src", r"<style>(.*?)</style>")):
        (text,) = re.findall(pattern, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy[1]


def test_nothing_is_fetched():
    page = page_of("glm4-9b").replace("http://www.w3.org/2000/svg", "")  # the name of a namespace, not an address
    assert not re.search(r"https?://|@import|url\((?!#)|<link(?! rel=\"icon\" href=\"data:,\")|src=", page)


def test_every_script_of_the_folder_is_in_the_page():
    scripts = {file.name for file in resources.files("fuligo.planner.html").iterdir() if file.name.endswith(".js")}
    assert scripts == set(html._PAGE.scripts)
