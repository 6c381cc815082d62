"""Answers of chat models, taken apart: reasoning, content and calls of tools."""
