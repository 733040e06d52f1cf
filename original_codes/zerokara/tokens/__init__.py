"""Documents → token files (.bin/.idx): the format, parallel encoding, the split for validation, counting."""
