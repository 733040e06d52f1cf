"""zerokara: a language model in one's own language, from scratch, in numbered steps.

Raw text → tokenizer → tokens → training → a Hugging Face model that is proved equal to the trained one. The layers of
the package are drawn in original_codes/README.md.
"""

__version__ = "0.1.0"
