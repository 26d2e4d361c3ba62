"""Metrics, model outputs and predictions."""
