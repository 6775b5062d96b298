r"""Normalization of answers: one LaTeX spelling for what Unicode, plain text and LaTeX synonyms write in several ways."""

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_COMMANDS = "π pi|θ theta|α alpha|β beta|λ lambda|φ phi|∞ infty|≤ le|⩽ le|≥ ge|⩾ ge|≠ ne|≈ approx|∪ cup|∩ cap|∈ in|∅ emptyset|± pm"
_CHARACTERS = {
    **{character: f"\\{command} " for character, _, command in (pair.partition(" ") for pair in _COMMANDS.split("|"))},
    **dict.fromkeys("−–—‐‑", "-"),
    **dict.fromkeys("×✕", r"\times "),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("\u00a0\u2009\u202f", " "),
    "ℝ": r"\mathbb{R}",
    "°": r"^{\circ}",
}
_ARGUMENT = r"[0-9a-zA-Z]|\\(?:pi|theta|alpha|beta|lambda|phi)(?![a-zA-Z])"
"""Argument that LaTeX takes without braces."""
_SYNONYMS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^\$*(-?)\\\$\s*(\d[\d,]*(?:\.\d+)?)[$.]*$", r"\1\2\\text{ dollars}"),
        (r"\\\$|\$", ""),
        (r"\\mathrm\s*\{\s*([eid])\s*\}", r"\1"),
        (r"\\[()]|\\\[(?!\d*(?:pt|em|ex)\])|\\\]", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])", ""),
        (r",\s*\\!\s*|\{\s*,\s*\}", ","),
        (r"\\!", ""),
        (r"(?<!\\)\\(?:[,;:> ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|thinspace(?![a-zA-Z])|enspace(?![a-zA-Z]))|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:mathrm|mathbf|mathit|mathsf|textrm|textbf|textit|textnormal|textsf|mbox|hbox|operatorname\*?)\s*\{", r"\\text{"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:leq|leqslant|lte)(?![a-zA-Z])|<=|=<", r"\\le "),
        (r"\\(?:geq|geqslant|gte)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\(?:neq)(?![a-zA-Z])|!=|\\not\s*=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:ast)(?![a-zA-Z])", r"\\cdot "),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (r"\\infin(?![a-zA-Z])|(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])(sin|cos|tan|ln|log|exp)(?=\s*\()", r"\\\1"),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", r"\\text{ degrees}"),
        (r"\s*(?:\\%|\\text\{\s*(?:%|percent|percentage|pct)\s*\}|(?<![a-zA-Z])(?:percent|percentage|pct)(?![a-zA-Z]))", "%"),
        (rf"\\frac\s*({_ARGUMENT})", r"\\frac{\1}"),
        (rf"(\\frac\s*\{{[^{{}}]*\}})\s*({_ARGUMENT})", r"\1{\2}"),
        (rf"\\sqrt\s*({_ARGUMENT})", r"\\sqrt{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*(-?\d{2,})", r"^{\1}"),
        (r"\^\s*-(\d)", r"^{-\1}"),
        (r"\\text\{\s*\}", " "),
        (r"\\mathbb\s*\{?R\}?", r"(-\\infty ,\\infty )"),
        (r"\\mp(?![a-zA-Z])", r"\\pm"),
    )
)


def normalize(text: str) -> str:
    """Return the text in one LaTeX spelling, without dollar signs, spacing commands, outer emphasis and closing punctuation."""
    text = _ascii(text.strip())
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2]
    if "\\begin" not in text:  # outside of matrices, a double backslash comes from JSON that was escaped twice
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)
    for pattern, replacement in _SYNONYMS:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"(?<!\.)[.,;:]\s*$", "", text).strip()


def _ascii(text: str) -> str:
    """Replace Unicode's mathematical characters by LaTeX."""
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda run: "^{" + run[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda run: "_{" + run[0].translate(_SUBSCRIPTS) + "}", text)
    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\d+|\w))", lambda root: "\\sqrt{" + (root[1] or root[2]) + "}", text)
    return "".join(_CHARACTERS.get(character) or _compatible(character) for character in text)


def _compatible(character: str) -> str:
    """Return a vulgar fraction as LaTeX, and full-width digits and punctuation as ASCII."""
    if character.isascii():
        return character
    plain = unicodedata.normalize("NFKC", character)
    if "⁄" in plain:
        above, _, below = plain.partition("⁄")
        return f"\\frac{{{above}}}{{{below}}}" if below else character
    return plain if len(plain) == 1 and plain.isascii() else character
