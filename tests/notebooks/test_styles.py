"""Series in plots can be told apart by everyone."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from notebooks.styles import COLOURS, DASHES, HATCHES, MARKERS

#: Linear RGB as it is seen without one kind of cone (Machado, Oliveira and Fernandes, 2009, severity 1).
SIGHT = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(axis=1)


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    t = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_stand_out_from_white(colour):
    """WCAG 2.2 asks for 3 to 1 for the parts of a graphic."""
    luminance = TO_XYZ[1] @ linear(colour)
    assert 1.05 / (luminance + 0.05) >= 3


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_stay_apart_however_one_sees_them(sight):
    """By CIE 1976 distance; 10 is several times what can just be seen."""
    seen = [lab(SIGHT[sight] @ linear(colour)) for colour in COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 10


def test_each_series_has_a_mark_a_dash_and_a_hatch_of_its_own():
    for kind in (MARKERS, DASHES, HATCHES):
        assert len(set(kind)) == len(kind) == len(COLOURS)
