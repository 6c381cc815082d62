"""Training of multi-token-prediction heads on a frozen base. Importing `config` does not import
torch."""
