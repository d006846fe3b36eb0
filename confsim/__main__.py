"""`python -m confsim`."""

from confsim.cli import main

if __name__ == "__main__":
    main()
