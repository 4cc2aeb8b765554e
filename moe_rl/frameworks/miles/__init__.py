"""miles, a fork of slime."""
