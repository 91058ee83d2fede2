"""The option table: one module for each group, one dataclass field for each option."""
