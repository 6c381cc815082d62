"""What a user asks for: requests, their parameters, prompts, texts and settings."""
