"""A causal language model seen as two verbs: sample and score."""
