"""`python -m kitforge` is the command line."""

from __future__ import annotations

from kitforge.cli import main

if __name__ == "__main__":
    main()
