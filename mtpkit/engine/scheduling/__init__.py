"""What runs next: requests, blocks and tokens of each step, by integers alone."""
