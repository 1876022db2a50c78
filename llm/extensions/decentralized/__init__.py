"""Replicas that average their weights, by gossip or DiLoCo."""
