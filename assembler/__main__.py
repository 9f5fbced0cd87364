"""`python -m draftgather`."""

from draftgather.bench.cli import main

if __name__ == "__main__":
    main()
