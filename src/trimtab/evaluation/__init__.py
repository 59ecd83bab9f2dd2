"""Evaluation: numbers that can be believed."""
