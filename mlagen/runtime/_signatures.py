"""Readers of calls' signatures of a package without wrappers: `build` writes a `_signatures` for each package."""
