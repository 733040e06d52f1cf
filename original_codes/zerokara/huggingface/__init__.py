"""To and from Hugging Face: weight rules per family, the conversion and its proof, the model card, the upload."""
