"""Which rows a tile works on, decided on the device: groups of any size, no host sync."""
