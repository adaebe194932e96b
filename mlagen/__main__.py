"""The command `mlagen`, and `python -m mlagen`."""

import signal


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback, also while its modules are imported."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command sets its own handler
    from mlagen.cli import main as command

    command()


if __name__ == "__main__":
    main()
