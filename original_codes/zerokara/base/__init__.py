"""What every room stands on: errors, files and locks on disk, manifests, progress, and what a machine has."""
