"""Which rows leave a full tier first: policies and the queues behind them."""
