"""`python -m kitforge` is the command line."""

from __future__ import annotations

from kitforge.cli.main import main

if __name__ == "__main__":
    main()
