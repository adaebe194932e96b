"""Makes random calls: requests and answers as JSON, an object a line on stdin and stdout.

    python -m mlagen.verify.random.worker

The first request is the job: `device`, `seed`, `folders` of the packages, `only` (shell patterns of family/kernel) and
`progress`, a file that says which call runs. Its answer holds `stations`, and `gpu`: card, driver and versions. Each
request after it names a `station` by its number, a `shape`, the `first` call, `most` calls and `seconds`; its answer is
the tally.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlagen.verify.worker import import_package, prepare, take_stdout

MOST_RESERVED = 3 << 30  # bytes of GPU memory that a process keeps between batches


def machine(device: str) -> dict[str, str]:
    """Card, driver and versions."""
    import torch
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "card": device, "driver": ""}
    if device == "cuda":
        found["card"] = torch.cuda.get_device_name()
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
            found["driver"] = said.splitlines()[0].strip()
        except (OSError, subprocess.SubprocessError, IndexError):
            found["driver"] = "unknown"
    return found


class Batches:
    """The stations of a job, and their testers as they are needed."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._device, self._seed = job["device"], job["seed"]
        prepare(self._device)
        from mlagen.verify.random.station import Tester, stations_of
        from mlagen.verify.random.tally import Station

        self._packages: dict[str, Any] = {}
        self._testers: dict[int, Tester] = {}
        self.stations: list[Station] = []
        self._progress = os.open(job["progress"], os.O_WRONLY | os.O_CREAT)
        for folder in job["folders"]:
            self._packages[folder] = import_package(Path(folder))
            self.stations += stations_of(folder, self._packages[folder], self._device, job["only"])

    def tester(self, number: int) -> Any:
        """The tester of a station."""
        from mlagen.verify.random.station import Tester

        if number not in self._testers:
            station = self.stations[number]
            self._testers[number] = Tester(station, self._packages[station.package], self._device, self._seed)
        return self._testers[number]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The tally of a request."""
        tester = self.tester(request["station"])
        if "describe" in request:
            return {"case": tester.describe(request["shape"], request["describe"])}

        def begins(call: int) -> None:
            os.pwrite(self._progress, f"{call:12d}".encode(), 0)

        tally = tester.batch(request["shape"], request["first"], request["most"], request["seconds"], begins)
        if self._device == "cuda" and not tally.broken:
            import torch

            if torch.cuda.memory_reserved() > MOST_RESERVED:
                torch.cuda.empty_cache()  # the other processes may need the memory of a large call
        found: dict[str, Any] = tally.to_json()
        return found


def main() -> None:
    """Reads the job, then makes calls as they are asked for."""
    answers = take_stdout()
    job = json.loads(sys.stdin.readline())
    batches = Batches(job)
    stations = [asdict(station) for station in batches.stations]
    answers.write(json.dumps({"stations": stations, "machine": machine(job["device"])}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(batches.answer(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
