"""Bench: how fast a generated package is, beside its peers and below its roof, and which tiles make it fast."""

from mlagen.bench.report import markdown, to_json
from mlagen.bench.run import bench_package
from mlagen.bench.shapes import Shape, default_shapes

__all__ = ["Shape", "bench_package", "default_shapes", "markdown", "to_json"]
