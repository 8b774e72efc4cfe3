"""The OpenAI-compatible HTTP interface. Knows nothing of Ray, ranks or tensors."""
