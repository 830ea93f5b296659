"""One-shot pruning: from a dense transformers model to a spense checkpoint."""
