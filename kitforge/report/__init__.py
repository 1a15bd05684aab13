"""The run report: what a run folder holds, told on one page of HTML. It knows no model, data or trainer."""
