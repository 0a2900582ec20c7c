"""``python -m headrace`` is the command ``headrace``, for environments whose scripts are not on the path."""

from headrace.cli import main

if __name__ == "__main__":
    main()
