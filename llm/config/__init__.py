"""Options as a dataclass: command-line flags, TOML files, and a page of the documentation."""
