"""Training data: documents, tokenizers, token shards, and the order in which a run reads tokens."""
