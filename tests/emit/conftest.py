import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "layout"))  # layout_specs: any layout
