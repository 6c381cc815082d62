"""Line charts: places of points, gaps, ticks and labels."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from mtpkit.training.plot import HEIGHT, MANY_POINTS, WIDTH, draw_lines

INF, NAN = math.inf, math.nan


def texts(svg):
    return [element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def curve_paths(svg):
    return re.findall(r'<path d="([^"]*)" stroke="#[0-9a-f]+" stroke-width="1.2"', svg)


def places(path):
    return [tuple(map(float, place.split())) for place in re.split("[ML]", path)[1:]]


def numbers(svg):
    return [float(text.replace(",", "")) for text in texts(svg) if re.fullmatch(r"[-+0-9.,e]+", text)]


def test_points_lie_where_the_ticks_say():
    svg = draw_lines("loss", [("a", [0, 5, 10], [0.0, 2.0, 4.0])], (0, 4))
    ((x0, y0), (x1, y1), (x2, y2)) = places(curve_paths(svg)[0])
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1) and y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert 0 < x0 < x2 < WIDTH and 0 < y2 < y0 < HEIGHT
    ticks = {
        element.text: (float(element.get("x")), float(element.get("y")) - 3)
        for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }
    assert ticks["4"][1] == pytest.approx(y2, abs=0.1) and ticks["10"][0] == pytest.approx(x2, abs=0.1)


def test_labels_and_titles_are_shown_and_escaped():
    svg = draw_lines("a < b", [("<x>", [1], [1.0]), ("y & z", [1], [2.0])])
    assert {"a < b", "step", "<x>", "y & z"} <= set(texts(svg))
    assert len(curve_paths(svg)) == 2 and svg.count("stroke-linecap") == 2
    assert "stroke-linecap" not in draw_lines("", [("", list(range(MANY_POINTS)), [1.0] * MANY_POINTS)])


def test_what_is_not_finite_interrupts_a_curve():
    svg = draw_lines("", [("", list(range(7)), [1.0, 2.0, NAN, 3.0, INF, -INF, 2.0])])
    assert re.sub(r"[0-9. ]", "", curve_paths(svg)[0]) == "MLMM"
    assert curve_paths(draw_lines("", [("", [1, 2], [NAN, NAN])])) == [""]


LARGE = [[1e300, -1e300], [1.7e308, 1.7e308], [1e16, 1e16 + 2], [0.25, 1234567.0]]
SMALL = [[0.0], [0.0, 0.0], [1.0], [-7.0, -7.0], [1e-5, 3e-5], [5e-324, 0.0], [NAN], [INF]]


@pytest.mark.parametrize("values", [*SMALL, *LARGE], ids=repr)
@pytest.mark.parametrize("limits", [(None, None), (0, 1), (0, None)])
def test_all_numbers_have_a_place_and_a_few_ticks(values, limits):
    svg = draw_lines("t", [("", [10**400, *range(len(values))][: len(values)], values)], limits)
    for path in curve_paths(svg):
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places(path))
    assert 4 <= len(numbers(svg)) <= 24 and all(map(math.isfinite, numbers(svg)))


def test_nothing_at_all():
    assert texts(draw_lines("none", []))[0] == "none"
