"""Bench: the speed of a generated package against its peers and its roof, and the search for the fastest tiles."""

from mlagen.bench.families import FAMILIES, shapes_of
from mlagen.bench.package import load_package
from mlagen.bench.report.tables import markdown, to_json
from mlagen.bench.run import bench_package

__all__ = ["FAMILIES", "bench_package", "load_package", "markdown", "shapes_of", "to_json"]
