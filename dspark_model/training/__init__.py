"""Training a drafter for any `transformers` causal LM: text generation, training, acceptance."""
