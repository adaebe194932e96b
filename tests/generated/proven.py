"""Imports generated packages under versions of Triton; prints as JSON each one's warnings and how it launches.

    python -I -W error proven.py TRITON_DIR VERSIONS PACKAGE_DIR...

TRITON_DIR: a folder to import Triton from; empty: the installed one. VERSIONS: the versions that Triton is to claim,
one after the other, with commas between; empty: its own.
By version and package: `warnings`, the category, text and file of each; `public`, how many of three launches of one
variant went through Triton's public call; `kept`, how many compiled kernels the package keeps to launch by itself.
"""

import importlib
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace


class Kernel:
    """Stands for a kernel: counts public launches. Each gives a compiled kernel."""

    def __init__(self):
        self.launched = 0

    @staticmethod
    def fn(q_ptr, tokens):
        """The compiled function."""

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *arguments, num_warps, num_stages, enable_fp_fusion):
        self.launched += 1
        return object()


def import_package(folder):
    spec = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = sys.modules[folder.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def launches(launch):
    """(public launches, kernels kept) of three launches, or of one where the next would go to a compiled kernel."""
    import torch

    kernel = Kernel()
    for _ in range(1 if launch.IN_RANGE else 3):
        launch.launch(kernel, 1, SimpleNamespace(q=torch.empty(1), tokens=1), (), 4, 1)
    kept = len(launch._COMPILED)
    launch._COMPILED.clear()
    return kernel.launched, kept


def look(package):
    """A package's warnings when it and all its modules are imported, and how it launches."""
    for name in [name for name in sys.modules if name.split(".")[0] == package.name]:
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        imported = import_package(package)
        for module in sorted(package.glob("[!_]*.py")):
            importlib.import_module(f"{package.name}.{module.stem}")
    public, kept = launches(imported._launch)
    said = [(one.category.__name__, str(one.message), one.filename) for one in caught]
    return {"warnings": said, "public": public, "kept": kept}


def main():
    folder, versions, *packages = sys.argv[1:]
    if folder:
        sys.path.insert(0, folder)
    import triton

    found = {}
    for version in versions.split(","):
        triton.__version__ = version or triton.__version__
        found[triton.__version__] = {Path(each).name: look(Path(each)) for each in packages}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
