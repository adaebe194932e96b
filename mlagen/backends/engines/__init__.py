"""Doors to engines and hubs: plugins, repositories and benchmark definitions around a package."""
