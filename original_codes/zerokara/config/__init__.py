"""The YAML files as frozen objects: strict loading, one error that lists every fault.

`loading` reads a file into one of three classes: `tokenizer_config` (step 1), `pretrain_config` (steps 2 and 3) or
`convert_config` (steps 4 and 6). `rendering` writes them back, with their docstrings as comments.
"""
