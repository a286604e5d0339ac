"""SVG charts: inside their box for any numbers, thinned when long, and adding up."""

from __future__ import annotations

import math
import re
from xml.dom import minidom

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.run.report.charts import HEIGHT, WIDTH, Series, line_chart, moving_average, stacked_chart


def coordinates(svg: str) -> list[float]:
    """Every x and y of the lines and areas, checked to lie in the box."""
    document = minidom.parseString(svg)
    numbers = [
        float(number)
        for kind in ("polyline", "polygon")
        for element in document.getElementsByTagName(kind)
        for number in re.split("[ ,]", element.getAttribute("points"))
        if number
    ]
    assert all(0 <= x <= WIDTH for x in numbers[::2]) and all(0 <= y <= HEIGHT for y in numbers[1::2])
    return numbers


def line(name: str, values: list[float]) -> Series:
    return Series(name, [(float(x), y) for x, y in enumerate(values)])


VALUES = st.floats() | st.sampled_from([0.0, 5e-324, 1e-6, 1.0, 1.7e308, -1.7e308])


@given(st.lists(st.lists(VALUES, max_size=5), min_size=1, max_size=3))
def test_line_chart_draws_any_numbers_inside_its_box(columns: list[list[float]]) -> None:
    svg = line_chart([line(f"s{i}", values) for i, values in enumerate(columns)])
    if "svg" in svg:
        coordinates(svg)
    else:
        assert not [v for values in columns for v in values if abs(v) < 1e300]


@settings(max_examples=25)
@given(st.floats(-1e3, 1e3), st.integers(1, 1500))
def test_long_series_stay_inside_and_short(level: float, length: int) -> None:
    numbers = coordinates(line_chart([line("s", [level + math.sin(i) for i in range(length)])]))
    assert len(numbers) <= 2 * (4 * 240)  # a band, a faint line and its moving average


def test_line_chart_breaks_at_a_value_that_is_not_finite() -> None:
    svg = line_chart([line("loss", [1.0, math.nan, 0.0, 0.5])])
    assert svg.count("<polyline") == 2
    assert "step 3: 0.5" in svg and "step 1" not in svg


def test_a_spread_is_a_band_of_its_height() -> None:
    svg = line_chart([Series("reward", [(0, 1.0), (1, 2.0)], spread=[0.5, 1.0])])
    (points,) = re.findall(r'class="f0 band" points="([^"]*)"', svg)
    ys = [float(point.split(",")[1]) for point in points.split()]
    # Ticks run from 0 (y 154) to 3 (y 14). Upper edge 1.5 and 3, then lower edge 1 and 0.5, from the right.
    assert ys == [84.0, 14.0, 107.3, 130.7]


def test_a_thinned_line_shows_its_extremes_as_a_band() -> None:
    values = [0.0] * 1000
    values[500] = 9.0
    svg = line_chart([line("spike", values)], smooth=False)
    (points,) = re.findall(r'class="f0 band" points="([^"]*)"', svg)
    assert min(float(point.split(",")[1]) for point in points.split()) < 30  # the spike is still seen


def test_smoothing_is_a_moving_average() -> None:
    assert moving_average([1.0, 2.0, 6.0, 7.0], 3) == [1.5, 3.0, 5.0, 6.5]
    noisy = line("loss", [float(i % 2) for i in range(40)])
    assert line_chart([noisy]).count("<polyline") == 2
    assert line_chart([noisy], smooth=False).count("<polyline") == 1


def test_tick_labels_tell_ticks_apart() -> None:
    for values, labels in (
        ([6.2108, 6.2126], ["6.2105", "6.2110", "6.2115", "6.2120", "6.2125", "6.2130"]),
        ([0.0, 3.0], ["0", "1", "2", "3"]),
        ([12000.0, 18000.0], ["12k", "14k", "16k", "18k"]),
        ([0.0, 4e-9], ["0", "1e-09", "2e-09", "3e-09", "4e-09"]),
    ):
        assert re.findall(r'text-anchor="end">([^<: ]+)</text>', line_chart([line("s", values)]))[:-1] == labels


def test_readings_name_the_step_and_every_series() -> None:
    svg = line_chart([line("a", [1.0, 2.0]), line("b<", [3.0, 4.0])])
    assert "step 1: a 2, b&lt; 4" in svg
    assert len(re.findall('class="at"', line_chart([line("s", [float(i) for i in range(900)])]))) <= 48


def test_readings_leave_out_a_line_where_it_has_no_points() -> None:
    svg = line_chart([line("long", [1.0] * 9), Series("late", [(4.0, 2.0), (6.0, 3.0)])])
    assert "step 3: long 1<" in svg and "step 5: long 1, late 2<" in svg and "step 7: long 1<" in svg
    svg = stacked_chart([Series("a", [(1.0, 2.0)]), Series("b", [(1.0, 3.0)])])
    assert re.findall("step [^<]*", svg) == ["step 1: a 2, b 3"]


def test_stacked_chart_adds_up() -> None:
    points = [(0.0, 1.0), (1.0, 3.0)]
    svg = stacked_chart([Series("a", points), Series("b", points)])
    # The plot spans x 46 to 350 and, for values 0 to 6, y 154 to 14.
    assert re.findall(r'polygon class="f\d" points="([^"]*)"', svg) == [
        "46.0,130.7 350.0,84.0 350.0,154.0 46.0,154.0",
        "46.0,107.3 350.0,14.0 350.0,84.0 46.0,130.7",
    ]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=6))
def test_stacked_chart_stays_inside_its_box(rows: list[tuple[float, float]]) -> None:
    series = [Series(name, [(float(x), row[i]) for x, row in enumerate(rows)]) for i, name in enumerate("ab")]
    assert len(coordinates(stacked_chart(series))) >= 16
