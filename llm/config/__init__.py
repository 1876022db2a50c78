"""A dataclass of options as flags, as a TOML file and as a page of the documentation."""
