"""Bars made of characters."""

from fuligo.planner.report import Palette, span_bar, stacked_bar

PALETTE = Palette(("weights", "optimizer", "graphs", "gradients", "weird"), colored=False)


def test_every_name_has_a_letter_of_its_own():
    (line,) = PALETTE.legend(80)
    assert line.plain == "w weights  o optimizer  h graphs  g gradients  e weird"


def test_the_legend_breaks_between_entries():
    assert [line.plain for line in PALETTE.legend(25)] == ["w weights  o optimizer", "h graphs  g gradients", "e weird"]


def test_parts_are_to_scale_up_to_the_capacity():
    bar = stacked_bar([("weights", 20), ("optimizer", 10)], capacity=40, scale=40, width=40, palette=PALETTE)
    assert bar.plain == "w" * 20 + "o" * 10 + "·" * 10 + "|"


def test_rounding_does_not_add_up():
    """Ten parts of 0.4 characters take four characters together."""
    bar = stacked_bar([("weights", 1)] * 10, capacity=100, scale=100, width=40, palette=PALETTE)
    assert bar.plain.count("w") == 4


def test_what_is_too_much_stands_behind_the_capacity():
    bar = stacked_bar([("weights", 30), ("optimizer", 20)], capacity=40, scale=50, width=50, palette=PALETTE)
    assert bar.plain == "w" * 30 + "o" * 10 + "|" + "o" * 10


def test_a_span_stands_where_it_happens_and_never_vanishes():
    assert span_bar("weights", 25, 50, 100, 20, PALETTE).plain == " " * 5 + "w" * 10 + " " * 5
    assert span_bar("weights", 100, 0, 100, 20, PALETTE).plain == " " * 19 + "w"


def test_color_needs_no_letters():
    colored = Palette(("weights",), colored=True)
    assert colored.run("weights", 3).plain == "███"
