"""How operations behave in a backward pass: its dtypes, its derivatives, and what it computes again."""
