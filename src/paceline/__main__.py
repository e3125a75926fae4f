"""``python -m paceline`` is the same program as ``paceline``."""

from paceline.cli import main

if __name__ == "__main__":
    main()
