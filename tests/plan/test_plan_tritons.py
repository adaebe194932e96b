"""Versions of Triton: a minor version stands for its releases."""

import itertools

import pytest

from mlagen.plan.tritons import TRITONS, minor, minors


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.7.1", (3, 7)),
        ("3.8.0+git123", (3, 8)),
        ("3.8+git123", (3, 8)),
        ("3.10.0.dev20270101", (3, 10)),
        ("3.9.0rc1", (3, 9)),
        ("4", (4,)),
        ("main", ()),
    ],
)
def test_a_minor_version_is_the_leading_two_numbers(version, expected):
    assert minor(version) == expected


def test_each_minor_version_is_named_once():
    assert minors(["3.7.0", "3.7.1", "3.10.0"]) == ("3.7", "3.10")


def test_the_tritons_are_one_a_minor_version_from_the_oldest_to_the_newest_without_a_gap():
    found = [minor(version) for version in TRITONS]
    assert all((one[0], one[1] + 1) == other for one, other in itertools.pairwise(found))
