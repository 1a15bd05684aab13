"""`python -m kitforge` is the command line."""

from kitforge.cli.main import main

if __name__ == "__main__":
    main()
