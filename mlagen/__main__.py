"""`python -m mlagen`."""

from mlagen.cli import main

if __name__ == "__main__":
    main()
