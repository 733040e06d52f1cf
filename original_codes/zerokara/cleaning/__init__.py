"""Raw text → what is in it, and what should not be: a report, the clean text, and what each rule dropped."""
