"""Requests without HTTP: `LLM` in Python, and batches of requests from a file."""

from cluster.offline.answer import Answer
from cluster.offline.llm import LLM

__all__ = ["LLM", "Answer"]
