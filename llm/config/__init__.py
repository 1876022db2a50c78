"""How a dataclass of options becomes flags, TOML and a page of the documentation."""
