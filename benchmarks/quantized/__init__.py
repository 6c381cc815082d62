"""What quantising a base costs: its own outputs, and the acceptance of heads on it."""
