"""Step 2 on a cluster: the tasks are dealt into parts, and a scheduler that is there already runs each on a machine."""
