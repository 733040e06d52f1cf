"""Examples for fine-tuning: records of pairs and conversations → segments of ids, read and learned in turn."""
