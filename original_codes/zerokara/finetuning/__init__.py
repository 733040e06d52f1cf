"""Fine-tuning: a run of `training` whose data are the examples of a task, and whose metric is of generated answers."""
