"""The command ``headrace``, also as ``python -m headrace``, for environments whose scripts are not on the path.

The modules of the commands take a moment to import. This one imports nothing of them before it can end on
Ctrl-C without a traceback.
"""

import sys


def main() -> None:
    try:
        from headrace.cli import main as run_command
    except KeyboardInterrupt:
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
