"""The run report: the metrics, events, samples and configuration of run folders as one HTML page."""
