"""Options as a dataclass: command-line flags and TOML files."""
