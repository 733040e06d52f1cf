"""zerokara: a language model in one's own language, from scratch, in numbered steps.

Raw text → tokenizer → tokens → training → a Hugging Face model that is proved equal to the trained one. The rooms of
the package are drawn in docs/architecture.md.
"""

__version__ = "1.0.0"
