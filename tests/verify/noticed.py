"""Which case of a package that was broken on purpose notices it, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path

CASE_SECONDS = 60  # of a CPU; a case ends within them, unless it has a loop without an end


class _TooLongError(BaseException):
    pass


def _stop(*_: object) -> None:
    raise _TooLongError


def noticed_by(
    folder: Path, targets: list[str], families: tuple[str, ...] | None, simulated: str, seed: int
) -> str | None:
    """The first case, in some order, that does not hold for a package; None if all hold.

    Args:
        folder: of the package.
        targets: of the interpreter: all cases with the first one's tiles, some with the others'.
        families: families of the cases to run; None: all.
        simulated: the sm90 kernel that cases run, in numpy; FREE: any; "": they run the portable kernels.
        seed: of the order.
    """
    from mlagen.verify.call.subject import SIMULATED
    from mlagen.verify.random.tally import FREE
    from mlagen.verify.worker import Run

    signal.signal(signal.SIGPROF, _stop)
    try:
        names = {"package_dir": str(folder), "device": "cpu", "targets": targets}
        run = Run({**names, "only": None, "families": families, "every": True})
    except Exception as error:
        return f"import: {type(error).__name__}"
    numbers = [number for number, (case, _) in enumerate(run.pairs) if "refuses" not in case.name]
    wanted = (*SIMULATED.values(),) if simulated == FREE else (simulated,)
    numbers = [number for number in numbers if SIMULATED.get(run.pairs[number][1], "") in wanted]
    assert numbers, f"no case of {simulated} for {folder}"
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
        try:
            result, _ = run.result(number)
        except _TooLongError:
            return f"{run.pairs[number][0].name}: no end"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if not result.ok:
            return f"{result.case}: {result.detail[:240]}"
    return None


def forked(*arguments: object) -> str | None:
    """The same in a fork, since some faults end the process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as answer:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            answer.write(json.dumps(noticed_by(*arguments)))  # type: ignore[arg-type]
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return str(json.loads(text)) if text and text != "null" else (None if text else "the process died")
