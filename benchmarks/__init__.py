"""Measurements of zerokara beside what a user would pick instead; README.md lists them.

Each is a module, started from the folder of the repository: ``python -m benchmarks.training.step``.
"""
