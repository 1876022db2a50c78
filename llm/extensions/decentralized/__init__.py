"""Decentralized training: replicas that average their weights, by gossip or DiLoCo."""
