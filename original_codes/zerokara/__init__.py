"""zerokara: a language model in one's own language, from scratch, in numbered steps.

Raw text → tokenizer → tokens → training → a Hugging Face model that is proved equal to the trained one. The packages
stand on floors, and imports go down only: ``steps``; ``training``, ``export``; ``samples``, ``model``, ``tokens``,
``tokenizer``; ``corpus``, ``checkpoint``; ``config``; and the ground (``errors``, ``durable``, ``manifest``,
``progress``).
"""

__version__ = "0.1.0"
