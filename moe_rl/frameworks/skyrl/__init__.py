"""SkyRL: what its runs set."""
