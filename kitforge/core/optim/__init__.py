"""Dense optimizers, schedules, parameter groups and the gradient norm. It knows no task, no mesh and no files."""
