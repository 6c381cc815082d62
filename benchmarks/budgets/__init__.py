"""Budgets by request beside equally many drafts for all."""
