"""Pipeline parallelism: stages, their placement, the order of their passes."""
