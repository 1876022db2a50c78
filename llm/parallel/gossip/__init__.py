"""Decentralised training: replicas with weights of their own, by gossip or DiLoCo."""
