"""Replicas with weights of their own."""
