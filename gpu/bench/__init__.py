"""How fast decode attention is, beside torch and FlashInfer."""
