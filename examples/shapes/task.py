"""Pictures of circles and squares, with questions that ask for their number."""

import io
import random
from typing import Any

SIDE, CELL = 32, 8
"""Width in pixels of a picture and of one of its 16 cells. A cell holds at most one shape and is one token."""
MOST = 4
"""Maximum number of circles in a picture, and of squares."""
COLORS = ("#e6584f", "#4f9de6", "#5fc46a", "#e6c34f")
QUESTIONS = {
    "<image>How many circles?": lambda circles, squares: circles,
    "<image>How many squares?": lambda circles, squares: squares,
    "<image>How many shapes?": lambda circles, squares: circles + squares,
}


def picture(circles: int, squares: int, rng: random.Random) -> bytes:
    """Return a PNG file with shapes of random colors in random cells."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), "#16181d")
    draw = ImageDraw.Draw(image)
    cells = rng.sample([(x, y) for x in range(0, SIDE, CELL) for y in range(0, SIDE, CELL)], circles + squares)
    for number, (x, y) in enumerate(cells):
        box, color = (x + 1, y + 1, x + CELL - 2, y + CELL - 2), rng.choice(COLORS)
        if number < circles:
            draw.ellipse(box, fill=color)
        else:
            draw.rectangle(box, fill=color)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def problem(rng: random.Random) -> dict[str, Any]:
    """Return a row of the data: a question, its picture as the package `datasets` stores images, and the answer."""
    circles, squares = (rng.randint(0, MOST) for _ in range(2))
    question = rng.choice(list(QUESTIONS))
    answer = QUESTIONS[question](circles, squares)
    return {"problem": question, "images": [{"bytes": picture(circles, squares, rng), "path": None}], "answer": str(answer)}
