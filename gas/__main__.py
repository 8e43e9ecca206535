"""``python -m gas``: the command ``gas``."""

from gas.cli import main

if __name__ == "__main__":
    main()
