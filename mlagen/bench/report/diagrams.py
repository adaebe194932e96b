"""Diagrams of the documents: the way from a spec to a package, and the schedule of the seesaw."""

from __future__ import annotations

from mlagen.bench.report.pictures import WIDTH, Picture
from mlagen.bench.report.svg import Canvas
from mlagen.plan.targets import TARGETS

# Columns of boxes, left to right: the title of each box and its lines.
STAGES = (
    (("spec", ("one YAML file:", "dims, cache,", "LSE, targets")),),
    (("plan", ("every number,", "derived once:", "bytes, tiles, grids")),),
    (("text", ("Triton and Gluon", "kernels, Python", "wrappers")),),
    (
        ("compile", (f"for {len(TARGETS)} targets,", "within limits")),
        ("verify", ("against float64,", "without a GPU")),
    ),
    (("package", ("plain source:", "needs only torch", "and triton")),),
)

# A step of the seesaw: the boxes of each warpgroup, as start, width, colour and label. Blue ones take tensor cores.
LANES = (
    (
        "WG0",
        "left half of O",
        (
            (0, 14, "green", "softmax 0"),
            (14, 16, "blue", "P0 x K0 left"),
            (32, 16, "blue", "P1 x K1 left"),
            (54, 26, "blue", "next Q x K0"),
        ),
    ),
    (
        "WG1",
        "right half of O",
        (
            (0, 14, "blue", "Q x K1"),
            (14, 14, "green", "softmax 1"),
            (30, 16, "blue", "P1 x K1 right"),
            (46, 16, "blue", "P0 x K0 right"),
        ),
    ),
    (
        "producer",
        "copies next K",
        (
            (31, 12, "grey", "K0 left"),
            (47, 12, "grey", "K1 right"),
            (63, 12, "grey", "K0 right"),
            (75, 12, "grey", "K1 left"),
        ),
    ),
)
# Values that one warpgroup hands to the other: name, lane and time of the sender, time of the receiver.
HANDED = (("m0", 0, 8, 14), ("m1", 1, 17, 23), ("P0", 0, 27, 46), ("P1", 1, 28, 32))
LANE, BOX = 84, 34


def pipeline() -> Picture:
    """Draw the stages between a spec and its package."""
    canvas = Canvas(WIDTH, 190)
    gap, height = 18.0, 74.0
    width = (WIDTH - 32 - gap * (len(STAGES) - 1)) / len(STAGES)
    for number, boxes in enumerate(STAGES):
        x = 16 + number * (width + gap)
        for place, (title, lines) in enumerate(boxes):
            y = 95 - height / 2 + (place - (len(boxes) - 1) / 2) * (height + 10)
            canvas.rect(x, y, width, height, "pale", 5)
            canvas.text(x + width / 2, y + 19, title, size=13.5, font_weight="bold", text_anchor="middle")
            for line, text in enumerate(lines):
                canvas.text(x + width / 2, y + 36 + 15 * line, text, size=11, text_anchor="middle")
        if number:
            canvas.line([(x - gap + 3, 95), (x - 5, 95)], "faint", 1.6)
            canvas.line([(x - 10, 90), (x - 5, 95), (x - 10, 100)], "faint", 1.6)
    said = "; ".join(f"{title}: {' '.join(lines)}" for boxes in STAGES for title, lines in boxes)
    alt = f"From a spec to a package. {said}"
    return Picture(canvas.svg(alt), alt)


def seesaw() -> Picture:
    """Draw one step of the seesaw: three warpgroups, their work over time, and the values that they exchange."""
    left, top = 118.0, 66
    canvas = Canvas(WIDTH, top + LANE * (len(LANES) - 1) + BOX + 18)
    scale = (WIDTH - left - 16) / 88

    def at(time: float) -> float:
        return left + time * scale

    canvas.text(16, 28, "One step of the seesaw", size=17, font_weight="bold")
    canvas.text(16, 46, "Time runs to the right, not to scale. Blue boxes take the tensor cores.", "faint", 12)
    for lane, (name, task, boxes) in enumerate(LANES):
        y = top + lane * LANE
        canvas.text(16, y + 15, name, font_weight="bold")
        canvas.text(16, y + 30, task, "faint", 12)
        for start, width, colour, label in boxes:
            canvas.rect(at(start), y, width * scale - 2, BOX, colour, 3)
            canvas.text(at(start + width / 2) - 1, y + 21, label, "paper", 11, text_anchor="middle")
    for name, lane, sent, taken in HANDED:
        rows = (top + BOX + 2, top + LANE - 3)
        start, end = rows if lane == 0 else rows[::-1]
        canvas.line([(at(sent), start), (at(taken) + 2, end)], "orange", 1.6)
        canvas.mark("circle", at(taken) + 2, end, "orange")
        canvas.text(
            at(0.4 * sent + 0.6 * taken) + 6, top + (BOX + LANE) / 2 + 4, name, "orange", 12, font_weight="bold"
        )
    alt = (
        "One step of the seesaw: WG0 and WG1 take turns with softmax and products and hand each other maxima and P; "
        "a producer copies the next halves of K"
    )
    return Picture(canvas.svg(alt), alt)
