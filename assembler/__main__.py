"""`python -m draftgather`."""

from draftgather.cli import main

if __name__ == "__main__":
    main()
