"""Publication of a model: the exported folder with its facts and model card, and its upload to the Hugging Face Hub."""
